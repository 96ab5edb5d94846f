#!/usr/bin/env bash
# Installs Tandem with pinned packages into .venv: the CUDA build if there is a GPU, else the CPU build. A second call reuses it.
#   bash launch/install.sh [--cuda | --cpu]     chooses the build, such as on a login node without GPUs; later calls keep it
# quickstart.sh, test.sh and docs.sh run it. TANDEM_PYTHON names another interpreter, of Python 3.11 or 3.12.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
say() { if [ -t 1 ]; then printf '\033[1m==>\033[0m %s\n' "$*"; else printf '==> %s\n' "$*"; fi; }

choice="$venv/.tandem-kind" # the build that the user chose
case "$*" in
  --cuda | --cpu) kind="${1#--}" ;;
  "") kind=$(cat "$choice" 2>/dev/null || true) ;;
  *) echo "launch/install.sh takes --cuda, --cpu or nothing, not: $*" >&2; exit 2 ;;
esac
if [ -z "$kind" ]; then
  kind=cpu
  gpus=0
  if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi
  if [ "$gpus" -ge 1 ]; then kind=cuda; fi
fi
pins=cpu.txt
if [ "$kind" = cuda ]; then pins=cuda.lock; fi
wanted="$kind $(cat "$root/launch/requirements/"{"$pins",test.txt,docs.txt} "$root/setup.py" | sha256sum | cut -c1-16)"
stamp="$venv/.tandem-installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  if [ $# -gt 0 ]; then printf '%s' "$kind" > "$choice"; fi
  say "Installation found in .venv ($kind); nothing to install."
  return 0 2>/dev/null || exit 0
fi

fits='import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'
python="${TANDEM_PYTHON:-}"
if [ -z "$python" ]; then
  for candidate in "$venv/bin/python" python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$fits" 2>/dev/null; then
      python="$candidate"; break
    fi
  done
fi
if [ -z "$python" ] || ! "$python" -c "$fits" 2>/dev/null; then
  if [ -n "$python" ]; then found="TANDEM_PYTHON=$python is neither"; else found="neither is on PATH"; fi
  echo "Tandem is pinned and tested on Python 3.11 and 3.12, and $found: install one, or name it in TANDEM_PYTHON." >&2
  exit 1
fi

# SGLang's wheels are for glibc 2.34 and newer; pip would only say that it finds no version.
libc="$(getconf GNU_LIBC_VERSION 2>/dev/null || true)"
libc="${libc#glibc }"
if [ -n "$libc" ] && [ "$(printf '%s\n' 2.34 "$libc" | sort -V | head -n 1)" != 2.34 ]; then
  echo "SGLang's wheels need glibc 2.34 or newer (RHEL 9, Debian 12, Ubuntu 22.04), and this system has $libc: use a container (launch/containers)." >&2
  exit 1
fi

started=$SECONDS
step() { # step TITLE COMMAND...: runs the command, shows the elapsed time, and keeps the output for an error
  local title="$1"; shift
  local log="$venv/install.log" pid began=$SECONDS
  printf '    %s' "$title"
  "$@" >"$log" 2>&1 &
  pid=$!
  # bash starts background jobs with SIGINT ignored: without this, Ctrl-C would leave pip running.
  trap 'kill "$pid" 2>/dev/null || true; echo; echo "Interrupted. Run the same command to continue." >&2; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    if [ -t 1 ]; then printf '\r    %s %ds ' "$title" $((SECONDS - began)); fi
    sleep 1
  done
  if ! wait "$pid"; then
    printf ' failed\n' ; tail -n 20 "$log" >&2
    echo "The installation failed at: $title. The output above says why. Fix it, and run the same command again." >&2
    exit 1
  fi
  trap - INT TERM
  if [ -t 1 ]; then printf '\r    %s' "$title"; fi
  printf ' done in %ds\n' $((SECONDS - began))
}
say "Installing Tandem ($kind) into .venv with $("$python" --version); about 3 GB and 2-3 minutes on a first run."
rm -f "$stamp"
# A .venv that is incomplete or of another Python is made again.
version="$("$python" -c 'import sys; print(sys.version_info[:2])')"
"$venv/bin/python" -c "import pip, sys; sys.exit(str(sys.version_info[:2]) != '$version')" 2>/dev/null || "$python" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)
if [ "$kind" = cpu ]; then
  # torch first and with its dependencies: an index without CPU builds gives the CUDA build, which needs its libraries to import.
  step "[1/3] torch" "${pip[@]}" "$(grep '^torch==' "$root/launch/requirements/cpu.txt")"
  # --no-deps: SGLang's metadata asks for a 4 GB CUDA stack that a machine without a GPU never loads.
  grep -v '^torch==' "$root/launch/requirements/cpu.txt" > "$venv/cpu-rest.txt"
  step "[2/3] engines and libraries" "${pip[@]}" --no-deps -r "$venv/cpu-rest.txt" -r "$root/launch/requirements/test.txt"
else
  # --no-deps: the lock has all of them, and pip would check each again.
  step "[1/3] engines" "${pip[@]}" --no-deps -r "$root/launch/requirements/cuda.lock"
  step "[2/3] test tools" "${pip[@]}" -r "$root/launch/requirements/test.txt"
fi
step "[3/3] tandem" "${pip[@]}" --no-deps --no-build-isolation --editable "$root"
if [ $# -gt 0 ]; then printf '%s' "$kind" > "$choice"; fi
printf '%s' "$wanted" > "$stamp"
say "Installed in $((SECONDS - started)) s."
