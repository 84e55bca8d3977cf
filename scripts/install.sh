#!/usr/bin/env bash
# install.sh <prefix>: builds the C++ library, without tests and without the PyTorch binding, and installs it with its
# headers, CMake package and licence. Only a compiler, CMake, Ninja and Highway's headers are needed.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$1

# Found out before minutes of compiling.
folder=${DESTDIR:-}$prefix
until [ -e "$folder" ]; do
  folder=$(dirname "$folder")
done
if ! [ -d "$folder" ] || ! [ -w "$folder" ]; then
  echo "PREFIX=$prefix: cannot write to $folder. Name another place, such as PREFIX=$HOME/.local, or use sudo." >&2
  exit 1
fi

scripts/setup.sh library
scripts/build.sh install --target tilewise
cmake --install build/install --prefix "$prefix"
