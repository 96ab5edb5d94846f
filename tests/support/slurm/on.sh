#!/usr/bin/env bash
# on.sh HOST CMD...: CMD on a "host" of hosts_up.sh: its network, /etc/hosts and host name. The process stays the same one, so signals reach CMD.
# (Not `ip netns exec`: that mounts a fresh /sys without /sys/fs/cgroup, and slurmd then refuses to start.)
BASE=${TANDEM_CLUSTER:?the folder of the cluster}
host=$1; shift
exec nsenter --net="/run/netns/$(basename "$BASE")-$host" unshare --mount --uts \
  sh -c 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"' "$BASE/etc/hosts" "$host" "$@"
