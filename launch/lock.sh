#!/usr/bin/env bash
# Resolves launch/requirements/cuda.txt, the packages that Tandem names, into cuda.lock, all packages of a CUDA environment.
#   bash launch/lock.sh           writes the lock; run it after a change of cuda.txt
#   bash launch/lock.sh --check   fails if the lock does not fit cuda.txt on Python 3.11 or 3.12
# It installs nothing and needs no GPU: it only reads the packages' metadata from pip's index.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
pins="$root/launch/requirements/cuda.txt" lock="$root/launch/requirements/cuda.lock"
python="$root/.venv/bin/python"
index="${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}"
if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi

resolve() { # resolve PYTHON [OPTION...]: the packages on stdout, for the oldest glibc that SGLang's wheels know
  local version="$1"; shift
  "$python" -m uv pip compile "$pins" --quiet --no-header --no-annotate --no-emit-index-url \
    --python-version "$version" --python-platform x86_64-manylinux_2_34 "$@"
}

case "$*" in
  "")
    packages=$(resolve 3.11)
    printf '%s\n' "# Resolved by launch/lock.sh from cuda.txt, for Linux on x86-64. It was not installed on that machine, which has no GPU." "$packages" > "$lock"
    echo "$lock: $(wc -l <<< "$packages") packages"
    ;;
  --check)
    for version in 3.11 3.12; do
      packages=$(resolve "$version" --constraint "$lock")
      diff <(grep -v '^#' "$lock") <(printf '%s\n' "$packages") >&2 || {
        echo "cuda.lock does not fit cuda.txt on Python $version (<: the lock); run bash launch/lock.sh" >&2; exit 1; }
    done
    ;;
  *) echo "launch/lock.sh takes --check or nothing, not: $*" >&2; exit 2 ;;
esac
