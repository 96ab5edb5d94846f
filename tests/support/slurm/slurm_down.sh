#!/usr/bin/env bash
# Ends the jobs of slurm_up.sh, then its daemons, then whatever else carries the cluster's name. May be called at any time, and again.
set -uo pipefail
BASE=${TANDEM_CLUSTER:?the folder of the cluster}
ON=$(dirname "$(readlink -f "$0")")/on.sh
export SLURM_CONF=$BASE/etc/slurm.conf
alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }
of_cluster() { grep -lsz "^SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ | cut -d/ -f3 | grep -vxE "$$|$PPID"; }
if [ -e "/run/netns/$(basename "$BASE")-hosta" ]; then
  on_control() { timeout 20 "$ON" hosta "$@"; }
else
  on_control() { timeout 20 "$@"; }
fi
if alive "$BASE/run/slurmctld.pid"; then
  on_control scancel --signal=KILL --full --user="$(id -un)"
  on_control scancel --user="$(id -un)"
  for ((t = 0; t < 30; t++)); do
    [ -z "$(on_control squeue -h)" ] && break
    sleep 0.5
  done
fi
daemons=("$BASE"/run/slurmd.*.pid "$BASE/run/slurmctld.pid" "$BASE/run/munged.pid")
for signal in TERM KILL; do
  for ((t = 0; t < 40; t++)); do
    left=0
    for file in "${daemons[@]}"; do
      alive "$file" || continue
      left=1
      [ "$t" = 0 ] && kill -$signal "$(cat "$file")"
    done
    [ "$left" = 1 ] || break 2
    sleep 0.25
  done
done
for ((t = 0; t < 20; t++)); do
  left=$(of_cluster)
  [ -n "$left" ] || break
  kill -KILL $left 2>/dev/null
  sleep 0.1
done
exit 0
