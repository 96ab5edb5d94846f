#!/usr/bin/env bash
# Ends every process of the two hosts of hosts_up.sh, then removes them. May be called at any time, and again.
set -uo pipefail
BASE=${TANDEM_CLUSTER:?the folder of the cluster}
for host in hosta hostb; do
  namespace=$(basename "$BASE")-$host
  [ -e "/run/netns/$namespace" ] || continue
  for signal in TERM KILL; do
    for ((t = 0; t < 20; t++)); do
      left=$(ip netns pids "$namespace")
      [ -n "$left" ] || break 2
      [ "$t" = 0 ] && kill -$signal $left 2>/dev/null
      sleep 0.1
    done
  done
  ip netns del "$namespace"
done
exit 0
