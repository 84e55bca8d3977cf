#!/usr/bin/env bash
# Builds a wheel that many Linux machines can install, and an sdist, into build/wheel. One file serves every Python from
# 3.10 and every torch from 2.10 on, with a GPU or without: the binding uses torch's stable ABI, CUDA's runtime is linked
# in, and bindings/torch/older_systems.cpp keeps to what older systems have.
#
# The drivers a wheel runs with depend on nvcc: binaries of nvcc 12 run with drivers of CUDA 12 and of all later ones,
# those of nvcc 13 need a driver of CUDA 13. So nvcc 12.8 or 12.9 is taken where it is installed, even if PATH has another;
# CUDACXX names one outright. PyPI has no nvcc of CUDA 12: its package nvidia-cuda-nvcc-cu12 holds ptxas and libnvvm.
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
  .venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
    --only-binary :all: -r scripts/requirements-wheel.txt
  echo "$key" >.venv-wheel/tilewise-setup
fi
python=$PWD/.venv-wheel/bin/python

# The binary is built with the headers of one torch, and runs with every other.
torch=${TORCH_DIR:-$(.venv/bin/python bindings/torch/find_torch.py)}
options=(-C "cmake.define.TILEWISE_TORCH_DIR=$torch" -C cmake.define.TILEWISE_OLDER_SYSTEMS=ON -C install.strip=true)
for option in "$@"; do
  [ "$option" = -D ] || options+=(-C "cmake.define.${option#-D}")
done
for nvcc in "${CUDACXX:-}" /usr/local/cuda-12.{8,9}/bin/nvcc "$(command -v nvcc || true)"; do
  [ ! -x "$nvcc" ] || break
done
cuda=
case "$*" in
*TILEWISE_CUDA=OFF*) ;;
*) [ ! -x "$nvcc" ] || cuda=$("$nvcc" --version | sed -nE 's/.*release ([0-9]+)\..*/\1/p') ;;
esac
if [ -n "$cuda" ]; then
  echo "nvcc      $nvcc, of CUDA $cuda"
  export CUDACXX=$nvcc
fi
# A driver older than nvcc does not read its PTX, so drivers of CUDA 12 need machine code for 7.5, too.
case "$cuda $*" in
*TILEWISE_CUDA_ARCHITECTURES*) ;;
12*) options+=(-C "cmake.define.TILEWISE_CUDA_ARCHITECTURES=75-real;80-real;90-real;90-virtual") ;;
esac

# Kernels are compressed as well as can be, as in a staged tree. Drivers of CUDA 12 do not all read that.
[ "$cuda" != 13 ] || options+=(-C cmake.define.CMAKE_CUDA_FLAGS=--compress-mode=size)

rm -rf build/wheel build/wheel-tree # a tree keeps the nvcc that it was configured with
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
if [ -n "$cuda" ]; then
  echo "runs      on CPUs, and on GPUs with a driver of CUDA $cuda or newer"
else
  echo "runs      on CPUs alone: it was built without CUDA"
fi
