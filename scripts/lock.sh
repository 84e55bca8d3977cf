#!/usr/bin/env bash
# Pins what set-up installs: every package that scripts/requirements-dev.in leads to, with its version and the hashes of
# its files, for Python 3.11 and later on Linux. Run it after a change of a .in file, and to take newer versions.
#   requirements-torch.txt   torch alone, since there are builds of it with CUDA and without
#   requirements-cuda.txt    what the builds with CUDA need on top
#   requirements-dev.txt     everything else
# requirements-wheel.in and requirements-coverage.in, which only make wheel and make coverage need, have a list each.
set -euo pipefail
cd "$(dirname "$0")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.8
compile() { # compile <requirements> <list>
  "$work/venv/bin/uv" pip compile --quiet --no-config --upgrade --universal --python-version 3.11 --generate-hashes \
    --no-annotate --no-header "$1" -o "$2"
}
compile requirements-dev.in "$work/all.txt"
for name in wheel coverage; do
  compile "requirements-$name.in" "$work/$name.txt"
  { echo "# By scripts/lock.sh; not to be edited." && cat "$work/$name.txt"; } >"requirements-$name.txt"
done

# The builds of torch without CUDA are not on the index that pip asks by itself. The tests have run with this one, for
# Python 3.11 on x86-64.
cpu_torch=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b

awk -v cpu_torch="$cpu_torch" '
  /^[a-zA-Z0-9]/ { # a package, whose hashes follow on lines of their own
    file = "requirements-dev.txt"
    if ($1 ~ /^torch==/) file = "requirements-torch.txt"
    if ($1 ~ /^(nvidia-|cuda-|triton==)/) file = "requirements-cuda.txt"
    if (/sys_platform == .(win32|emscripten)/) file = "/dev/null"
    if (file != "/dev/null" && !(file in begun)) print "# By scripts/lock.sh; not to be edited." > file
    begun[file]
  }
  { print > file }
  $1 ~ /^torch==/ { print "    --hash=" cpu_torch " \\" > file }
' "$work/all.txt"
wc -l requirements-*.txt
