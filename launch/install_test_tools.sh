#!/usr/bin/env bash
# Installs what some tests run on besides Python: Slurm, iproute2 and bubblewrap, Debian packages. Without them, or without the right to install them,
# those tests are skipped with the reason; so this never fails. A second call finds them and does nothing.
set -uo pipefail
say() { printf '==> %s\n' "$*"; }

missing=()
for tool in slurmctld slurmd munged srun ip nsenter bwrap; do command -v "$tool" >/dev/null 2>&1 || missing+=("$tool"); done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  say "Not found: ${missing[*]}. Tests on Slurm, on two hosts and under bubblewrap will be skipped; as root on Debian they would be installed here."
  exit 0
fi
say "Installing Slurm, iproute2 and bubblewrap for tests (about 4 MB; at most 3 minutes)."
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
limited() { timeout --kill-after=10 90 apt-get -o DPkg::Lock::Timeout=60 -qq "$@" >>"$log" 2>&1; }
began=$SECONDS
limited update # where it fails, older lists may do
# What is installed needs no daemon: the tests start their own, and end them.
if limited install -y --no-install-recommends slurm-wlm munge iproute2 util-linux bubblewrap; then
  say "Installed in $((SECONDS - began)) s."
else
  tail -n 5 "$log" >&2
  say "That did not work, for the reason above: tests on Slurm, on two hosts and under bubblewrap will be skipped."
fi
rm -f "$log"
