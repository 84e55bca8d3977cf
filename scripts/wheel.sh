#!/usr/bin/env bash
# Builds a wheel that many Linux machines can install, and an sdist, into build/wheel. One file serves every Python from
# 3.10 and every torch from 2.10 on, with a GPU or without: the binding uses torch's stable ABI, CUDA's runtime is linked
# in, and bindings/torch/older_systems.cpp keeps to what older systems have.
#
#   scripts/wheel.sh [-D NAME=VALUE]...     options of cmake; -D TILEWISE_CUDA=OFF leaves the GPU out
set -euo pipefail
cd "$(dirname "$0")/.."

platform=manylinux_2_28_x86_64
most_megabytes=30

exec 9<scripts/wheel.sh # two at once would undo each other's work
flock 9

key=$({ pwd && cat scripts/requirements-wheel.txt; } | sha256sum)
if [ "$(cat .venv-wheel/tilewise-setup 2>/dev/null)" != "$key" ]; then
  python3 -c 'import ensurepip, venv' || {
    echo "A Python that makes virtual environments is needed: apt-get install python3-venv" >&2
    exit 1
  }
  echo "Making .venv-wheel"
  rm -rf .venv-wheel # perhaps half made
  python3 -m venv .venv-wheel
  .venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements-wheel.txt
  echo "$key" >.venv-wheel/tilewise-setup
fi
python=$PWD/.venv-wheel/bin/python

# The binary is built with the headers of one torch, and runs with every other.
torch=${TORCH_DIR:-$(.venv/bin/python bindings/torch/find_torch.py)}
options=(-C "cmake.define.TILEWISE_TORCH_DIR=$torch" -C cmake.define.TILEWISE_OLDER_SYSTEMS=ON -C install.strip=true)
for option in "$@"; do
  [ "$option" = -D ] || options+=(-C "cmake.define.${option#-D}")
done

rm -rf build/wheel
mkdir -p build/wheel
"$python" -m build --no-isolation --sdist --outdir build/wheel .
"$python" -m build --no-isolation --wheel --outdir build/wheel/here -C build-dir=build/wheel-tree "${options[@]}" .
PATH="$PWD/.venv-wheel/bin:$PATH" "$python" -m auditwheel repair --plat "$platform" --only-plat \
  --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir build/wheel build/wheel/here/*.whl
rm -r build/wheel/here

wheel=$(echo build/wheel/*.whl)
"$python" -m auditwheel show "$wheel" | sed -n '/references external/,$p'
megabytes=$(($(stat -c %s "$wheel") / 1000000))
[ "$megabytes" -lt "$most_megabytes" ] || { echo "$wheel has $megabytes MB, more than $most_megabytes" >&2; exit 1; }
ls -l build/wheel/* | awk '{ printf "built     %s, %.1f MB\n", $NF, $5 / 1e6 }'
