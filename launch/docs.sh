#!/usr/bin/env bash
# Builds the documentation site into site/, strictly: a broken link or anchor fails.
# Arguments go to `mkdocs build`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || bash launch/install.sh
if ! "$python" -c 'import material, mkdocs, pymdownx' 2>/dev/null; then
  # --no-deps: the list is complete, and no pin of the engines' environment may move.
  "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r launch/requirements/docs.txt
fi
export NO_MKDOCS_2_WARNING=1 # a note of the theme about its successor
exec "$python" -m mkdocs build --strict "$@" # no --quiet: with it mkdocs counts no warnings
