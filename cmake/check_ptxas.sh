#!/usr/bin/env bash
# check_ptxas.sh <compiler> <arguments with -Xptxas=-v>: compiles, and fails where ptxas puts wgmma instructions
# one after another, leaves setmaxnreg out (both it calls mere information, C75xx), or spills registers. Where a
# branch passes products by, it adds a fence (C7519), which costs nothing.
set -uo pipefail
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$@" 2>"$report"
status=$?
grep -v -E '^ptxas info|^    [0-9]+ bytes stack frame' "$report" >&2
lost=$(grep -v C7519 "$report" | grep -E 'C75[0-9]{2}|[1-9][0-9]* bytes spill')
if [ -n "$lost" ]; then
  printf 'ptxas gives up what the kernel was written for:\n%s\n' "$(grep -E 'Compiling entry|C75[0-9]{2}|spill' "$report")" >&2
  exit 1
fi
exit $status
