#!/usr/bin/env bash
# slurm_up.sh HOST HOST: a Slurm of two nodes on one machine, without systemd, cgroups or accounting: one node per host of hosts_up.sh,
# with its network and name; the controller is on the first. Needs root; everything is in $TANDEM_CLUSTER.
# Commands find it by SLURM_CONF=$TANDEM_CLUSTER/etc/slurm.conf; they have to be run on a host (on.sh).
set -euo pipefail
BASE=${TANDEM_CLUSTER:?the folder of the cluster}
ON=$(dirname "$(readlink -f "$0")")/on.sh
CONTROL_PORT=16817 PORT_1=17001 PORT_2=17002

install -d -m 755 "$BASE"/{etc,run,log,state,spool,dev}
for ((gpu = 0; gpu < 8; gpu++)); do ln -s /dev/null "$BASE/dev/nvidia$gpu"; done # pretended: Slurm wants device files, and opens none
(umask 077 && dd if=/dev/urandom bs=1024 count=1 of="$BASE/etc/munge.key" status=none)
NODES=("$@") CONTROL=$1
on() { "$ON" "$@"; }
address() { awk -v host="$1" '$2 == host {print $1}' "$BASE/etc/hosts"; }
# What differs from a cluster in earnest: a node without answer is given up after 20 s (300), and a requeued job may start after 7 s (120),
# which is what cred_expire brings. From TERM to KILL are 60 s (30), since the machine is slow.
cat > "$BASE/etc/slurm.conf" << CONF
ClusterName=test
SlurmctldHost=$CONTROL($(address "$CONTROL"))
SlurmctldPort=$CONTROL_PORT
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$BASE/run/munge.socket,cred_expire=5
StateSaveLocation=$BASE/state
SlurmdSpoolDir=$BASE/spool/%n
SlurmctldPidFile=$BASE/run/slurmctld.pid
SlurmdPidFile=$BASE/run/slurmd.%n.pid
SlurmctldLogFile=$BASE/log/slurmctld.log
SlurmdLogFile=$BASE/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
JobRequeue=1
KillWait=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=${NODES[0]} NodeHostname=$(on "${NODES[0]}" hostname -s) NodeAddr=$(address "${NODES[0]}") Port=$PORT_1 CPUs=16 RealMemory=64000 Gres=gpu:8
NodeName=${NODES[1]} NodeHostname=$(on "${NODES[1]}" hostname -s) NodeAddr=$(address "${NODES[1]}") Port=$PORT_2 CPUs=16 RealMemory=64000 Gres=gpu:8
PartitionName=low  Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=10
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
CONF
echo "Name=gpu File=$BASE/dev/nvidia[0-7]" > "$BASE/etc/gres.conf"
export SLURM_CONF=$BASE/etc/slurm.conf

munged --key-file="$BASE/etc/munge.key" --socket="$BASE/run/munge.socket" --pid-file="$BASE/run/munged.pid" \
  --log-file="$BASE/log/munged.log" --seed-file="$BASE/run/munge.seed"
on "$CONTROL" slurmctld
for node in "${NODES[@]}"; do on "$node" slurmd -N "$node"; done
for ((t = 0; t < 120; t++)); do
  [ "$(on "$CONTROL" sinfo -h -N -p low -t idle -o %N | wc -l)" = 2 ] && exit 0
  sleep 0.5
done
on "$CONTROL" sinfo
echo "not both nodes idle after 60 s" >&2
exit 1
