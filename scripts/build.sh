#!/usr/bin/env bash
# build.sh <preset> [options of cmake --build]: configures build/<preset> where needed and builds it.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift

mkdir -p build
exec 9>"build/$preset.lock" # two builds in one tree would corrupt it
flock 9

# A tree is configured afresh after an interrupted configuration, a move or a change of the presets.
stamp=build/$preset/tilewise-configured
key=$({ pwd && cat CMakePresets.json scripts/build.sh; } | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
  # The binding is built for the torch that the tests run with.
  cmake --fresh --preset "$preset" -D Python3_EXECUTABLE="$PWD/.venv/bin/python"
  echo "$key" >"$stamp"
fi
cmake --build --preset "$preset" "$@"
