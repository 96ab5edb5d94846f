#!/usr/bin/env bash
# Two "hosts" on one machine, hosta (10.77.0.1) and hostb (10.77.0.2): network namespaces joined by a link, each with its own host name.
# Needs root. Namespaces are named after the folder of the cluster, so that several clusters do not meet; they have addresses of their own.
# Cut and restore the link: ip -n NAMESPACE-OF-HOSTB link set link0 down|up
set -euo pipefail
BASE=${TANDEM_CLUSTER:?the folder of the cluster}
A=$(basename "$BASE")-hosta B=$(basename "$BASE")-hostb NET=10.77.0
install -d "$BASE/etc"
printf '127.0.0.1 localhost\n%s.1 hosta\n%s.2 hostb\n' "$NET" "$NET" > "$BASE/etc/hosts"
ip netns add "$A"
ip netns add "$B"
ip link add link0 netns "$A" type veth peer name link0 netns "$B"
ip -n "$A" addr add "$NET.1/24" dev link0
ip -n "$B" addr add "$NET.2/24" dev link0
for namespace in "$A" "$B"; do
  ip -n "$namespace" link set lo up
  ip -n "$namespace" link set link0 up
done
for ((t = 0; t < 100; t++)); do # a refused connection is an answer
  case "$(ip netns exec "$A" bash -c "exec 3<>/dev/tcp/$NET.2/9" 2>&1)" in *refused*) exit 0 ;; esac
  sleep 0.1
done
echo "no answer from hostb" >&2
exit 1
