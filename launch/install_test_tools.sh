#!/usr/bin/env bash
# Installs the Debian packages that some tests need: Slurm, iproute2 and bubblewrap. If they cannot be installed, those tests are skipped
# with the reason, so this script never fails. A second call finds the packages and does nothing.
# --environments: verifiers and OpenEnv too, each in an environment of its own (1 GB, some minutes), for tests of their examples.
set -uo pipefail
say() { printf '==> %s\n' "$*"; }

if [ "${1:-}" = --environments ]; then
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  for package in verifiers==0.4.0 openenv==0.10.0; do
    folder="$root/.venv-${package%%==*}"
    [ -e "$folder/bin/python" ] && continue
    say "Installing $package into $folder."
    if ! { "${PYTHON:-python3.11}" -m venv "$folder" && "$folder/bin/pip" install -q "$package"; }; then
      rm -rf "$folder"
      say "Not installed, for the reason above: tests of ${package%%==*} will be skipped."
    fi
  done
fi

missing=()
for tool in slurmctld slurmd munged srun ip nsenter bwrap; do command -v "$tool" >/dev/null 2>&1 || missing+=("$tool"); done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  say "Not found: ${missing[*]}. Tests on Slurm, on two hosts and under bubblewrap will be skipped. As root on Debian, this script installs them."
  exit 0
fi
say "Installing Slurm, iproute2 and bubblewrap for tests (about 4 MB; at most 3 minutes)."
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
limited() { timeout --kill-after=10 90 apt-get -o DPkg::Lock::Timeout=60 -qq "$@" >>"$log" 2>&1; }
began=$SECONDS
limited update # if it fails, older lists may be enough
# The packages need no running daemons: the tests start and end their own.
if limited install -y --no-install-recommends slurm-wlm munge iproute2 util-linux bubblewrap; then
  say "Installed in $((SECONDS - began)) s."
else
  tail -n 5 "$log" >&2
  say "Not installed, for the reason above: tests on Slurm, on two hosts and under bubblewrap will be skipped."
fi
rm -f "$log"
