#!/usr/bin/env bash
# about.sh test|bench|install: says what the command is about to do, and about how long it takes.
set -euo pipefail
cd "$(dirname "$0")/.."
command=$1

minutes=0
line() { # line <minutes> <what is done>
  printf '  %-72s %3s min\n' "$2" "$1"
  minutes=$((minutes + $1))
}

# Minutes are those of two cores of 2.x GHz.
cuda=$(command -v nvcc || true)
cache=$(command -v ccache || true)
