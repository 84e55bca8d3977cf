#!/usr/bin/env bash
# build.sh <preset> [options of cmake --build]: configures build/<preset> where needed and builds it.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift

mkdir -p build
exec 9>"build/$preset.lock" # two builds in one tree would corrupt it
flock 9

# A tree is configured afresh after an interrupted configuration, a move, a change of the presets, and where nvcc, the
# compiler cache or .venv came, went or changed.
stamp=build/$preset/tilewise-configured
key=$({
  pwd
  command -v nvcc ccache || true
  cat CMakePresets.json scripts/build.sh .venv/tilewise-setup 2>/dev/null || true
} | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
  # The binding is built for the torch that the tests run with; the library alone has none.
  python=(-D Python3_EXECUTABLE="$PWD/.venv/bin/python")
  [ "$preset" != install ] || python=()
  cmake --fresh --preset "$preset" "${python[@]}"
  echo "$key" >"$stamp"
fi
cmake --build --preset "$preset" "$@"
