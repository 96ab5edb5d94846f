#!/usr/bin/env bash
# hold.sh hosts|slurm-hosts: the cluster in $TANDEM_CLUSTER is up ($TANDEM_CLUSTER/up) as long as the process that started this script
# keeps its standard input open. Then nothing of it is left, whether that process closed it, failed, was interrupted or killed.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
trap 'exit 1' TERM INT HUP
trap 'set +e; trap "" TERM INT HUP; "$here/slurm_down.sh"; "$here/hosts_down.sh"; rm -rf "$TANDEM_CLUSTER"' EXIT
case $1 in
  hosts) "$here/hosts_up.sh" ;;
  slurm-hosts) "$here/hosts_up.sh" && "$here/slurm_up.sh" hosta hostb ;;
esac
touch "$TANDEM_CLUSTER/up"
read -r -d '' _ || true
