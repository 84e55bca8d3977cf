#!/usr/bin/env bash
# Checks the layout of C++ and CUDA (clang-format) and Python (ruff), and the package's types (mypy; half a
# minute the first time, then seconds). With --fix, mends the layout.
set -uo pipefail
cd "$(dirname "$0")/.."

format=(.venv/bin/clang-format --dry-run -Werror)
ruff_check=(.venv/bin/ruff check --quiet)
ruff_format=(.venv/bin/ruff format --quiet --diff)
if [ "${1:-}" = --fix ]; then
  format=(.venv/bin/clang-format -i)
  ruff_check+=(--fix)
  ruff_format=(.venv/bin/ruff format --quiet)
fi

# Files git tracks or would track; outside a git tree (a release archive), all but the folders we make.
sources() {
  if [ -e .git ] && git status >/dev/null 2>&1; then
    git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh'
  else
    find . \( -path ./build -o -path ./.venv \) -prune -o \
      -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0
  fi
}

status=0
sources | while IFS= read -r -d '' file; do
  [ ! -f "$file" ] || printf '%s\0' "$file" # deleted, but not yet in the index
done | xargs -0 -r "${format[@]}" || status=1
"${ruff_check[@]}" . || status=1
"${ruff_format[@]}" . || status=1
.venv/bin/mypy --no-error-summary || status=1
exit $status
