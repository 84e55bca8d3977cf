#!/usr/bin/env bash
# about.sh test|bench|install: what the command is going to do, and about how long that takes.
set -euo pipefail
cd "$(dirname "$0")/.."
command=$1

# Rough minutes on two cores without a compiler cache, on an AMD EPYC server. Those of builds are half of the CPU time that
# they took, the others are by the clock of single runs.
set_up=3
library=1
library_cuda=8
tests=1
tests_cuda=2
binding=1
run_tests=7
sanitized=4
emulated=5
fuzzed=4
bench=2

total=0
line() { # line <what is done> <minutes>
  printf '  %3d min  %s\n' "$2" "$1"
  total=$((total + $2))
}

cuda=
if command -v nvcc >/dev/null; then
  cuda=" with CUDA"
  library=$library_cuda
  tests=$tests_cuda
fi

set_up() {
  [ -e .venv/tilewise-setup ] || line "install what is missing, after asking, and make .venv" $set_up
}
build() { # build <tree> <what> <minutes>
  if [ -e "build/$1/tilewise-configured" ]; then
    line "build what changed of $2" 1
  else
    line "build $2" "$3"
  fi
}

echo "make $command is going to"
case $command in
test)
  set_up
  line "check the layout of the sources and the package's types" 1
  build release "the library$cuda, the PyTorch binding, the tests and the benchmark" $((library + binding + tests))
  line "run the tests in C++ and in Python" $run_tests
  build asan "the library and the C++ tests with AddressSanitizer and UBSan, and run them" $sanitized
  [ -z "$cuda" ] || build emulated "the CUDA kernels for the CPU, and run them there" $emulated
  build fuzz "the fuzzers, and let them run" $fuzzed
  ;;
bench)
  set_up
  build release "the library$cuda and the PyTorch binding" $((library + binding))
  line "measure kernels and their peers, and write a report" $bench
  ;;
install)
  build install "the library$cuda" $library
  ;;
esac
echo "That is about $total min on two cores, and less on more of them; this machine has $(nproc)."
if command -v ccache >/dev/null; then
  echo "ccache is here: what it has seen compiles in no time."
fi
echo
