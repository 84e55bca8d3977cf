#!/usr/bin/env bash
# Builds the site from docs/ into build/site. Its tools live in .venv-docs, so that building and testing need none of them.
set -euo pipefail
cd "$(dirname "$0")/.."

exec 9<scripts/docs.sh # two at once would undo each other's work
flock 9

key=$({ pwd && cat scripts/requirements-docs.txt; } | sha256sum)
if [ "$(cat .venv-docs/tilewise-setup 2>/dev/null)" != "$key" ]; then
  python3 -c 'import ensurepip, venv' || {
    echo "A Python that makes virtual environments is needed: apt-get install python3-venv" >&2
    exit 1
  }
  echo "Making .venv-docs"
  rm -rf .venv-docs # perhaps half made
  python3 -m venv .venv-docs
  .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements-docs.txt
  echo "$key" >.venv-docs/tilewise-setup
fi

.venv-docs/bin/python scripts/docs_pages.py
# Material prints advertisements for its successor; warnings of our pages are what counts, and they are errors.
NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
echo "site      build/site/index.html"
