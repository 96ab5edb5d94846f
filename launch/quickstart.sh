#!/usr/bin/env bash
# One command from a fresh machine to a trained, evaluated, exported model and a report. Arguments: --seed N, --steps N, --study.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
began=$SECONDS
bash launch/install.sh
exec .venv/bin/tandem quickstart --install-seconds $((SECONDS - began)) "$@"
