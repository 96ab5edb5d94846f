#!/usr/bin/env bash
# Installs what tests need and runs them all, four files at a time (TANDEM_TEST_WORKERS). Arguments go to pytest:
# `bash launch/test.sh -m quick` is the quick part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh
bash launch/install_test_tools.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
# Hundreds of processes import these. If PYTHONDONTWRITEBYTECODE is set, each would compile them again.
.venv/bin/python -m compileall -q configs launch numerics parallel rollout tracing trainer tests
.venv/bin/python -m tests.support.rewritten # otherwise each pytest worker rewrites the assertions of all tests
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest --numprocesses "${TANDEM_TEST_WORKERS:-4}" --dist loadfile --no-loadscope-reorder --durations 12 "$@"
