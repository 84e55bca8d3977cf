#!/usr/bin/env bash
# stage.sh [options of cmake]: builds a release with CUDA in build/cuda and gathers build/stage, which runs on a
# machine with an NVIDIA driver, Python with torch, and nothing else. Options that matter:
#   -D TILEWISE_CUDA_ARCHITECTURES=90-real   for one GPU alone, which compiles sooner
#   -D TILEWISE_CUDA_ARCHITECTURES=75-virtual   what a GPU of 7.5 runs, on any newer one (or 80-virtual)
#   -D TILEWISE_TORCH_DIR=.../torch          torch's folder, in place of the one in .venv
# With SWEEPS=mma,mma_backward in the environment the programs that time candidates for these tables come along
# (gpu-sweep); SWEEPS=all: those of all tables of mma. With EXAMPLES=minilm the program of examples/cpp/minilm comes
# along, and the library it is linked to.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=build/cuda
stage=build/stage
most_bytes=60000000
sweeps=${SWEEPS:-}
[ "$sweeps" != all ] || sweeps=mma,mma_backward,mma_f32,mma_f32_backward
IFS=, read -ra sweeps <<<"$sweeps"
sweeps=("${sweeps[@]/#/sweep_}")
examples=${EXAMPLES:-}
case $examples in
'' | minilm) ;;
*)
  echo "EXAMPLES: expected minilm, got $examples" >&2
  exit 1
  ;;
esac

cached() { # what CMake found
  sed -n "s/^$1:[^=]*=//p" "$tree/CMakeCache.txt"
}
soname() { # what a library is looked for by
  objdump -p "$1" | sed -n 's/ *SONAME *//p'
}

mkdir -p build
exec 9>"$tree.lock" # two builds in one tree would corrupt it
flock 9

# As in build.sh: configured afresh after an interruption, a move, or a change of what it is configured by.
stamp=$tree/tilewise-configured
key=$({ pwd && printf '%s\n' "$@" && cat CMakePresets.json scripts/stage.sh; } | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
  # Kernels are compressed as well as can be, to a tenth, and programs share them: only the binding has its own.
  cmake --fresh --preset release -B "$tree" -D TILEWISE_CUDA=ON -D CMAKE_CUDA_FLAGS=--compress-mode=size \
    -D TILEWISE_SHARE_LIBRARY=ON \
    -D CMAKE_BUILD_WITH_INSTALL_RPATH=ON -D 'CMAKE_INSTALL_RPATH=$ORIGIN/../lib' \
    -D Python3_EXECUTABLE="$PWD/.venv/bin/python" "$@"
  echo "$key" >"$stamp"
fi

tests=(host_test cuda_test tilewise_property tilewise_soak)
binding=$(cmake --build "$tree" --target help | sed -n 's/^\(tilewise_torch\):.*/\1/p')
sources=$(python3 scripts/results_status.py --sources)
kernels=$(python3 scripts/results_status.py --kernels)
# shellcheck disable=SC2086 # the binding and the examples: none or one word
cmake --build "$tree" --target "${tests[@]}" tilewise_bench call_cost $binding $examples "${sweeps[@]}"
if [ "$sources" != "$(python3 scripts/results_status.py --sources)" ]; then
  echo "The sources changed while they were built. Please try again." >&2
  exit 1
fi

rm -rf "$stage"
mkdir -p "$stage"/{bin,lib,bench,tests,python,tools}
for test in "${tests[@]}"; do
  strip -o "$stage/bin/$test" "$tree/tests/$test"
done
strip -o "$stage/bin/tilewise_bench" "$tree/bench/tilewise_bench"
strip -o "$stage/bin/call_cost" "$tree/bench/call_cost"
on_request=()
for sweep in "${sweeps[@]}"; do
  strip -o "$stage/bin/$sweep" "$tree/bench/$sweep"
  on_request+=("$stage/bin/$sweep")
done
strip -o "$stage/lib/libtilewise_internal.so" "$tree/src/libtilewise_internal.so"
cudart=$(cached CUDA_cudart_LIBRARY)
cp -L "$cudart" "$stage/lib/$(soname "$cudart")"
if [ -n "$examples" ]; then
  library=$stage/lib/$(soname "$tree/src/libtilewise.so")
  strip -o "$stage/bin/minilm" "$tree/tests/minilm/minilm"
  strip -o "$library" "$tree/src/libtilewise.so"
  on_request+=("$stage/bin/minilm" "$library")
fi
# torch comes with an OpenMP of its own, which programs cannot find; libstdc++ is torch's need, too.
cp "$(g++ -print-file-name=libgomp.so.1)" "$stage/lib/"
cp -r python/tilewise/bench/suites "$stage/bench/"
cp scripts/gpu-test scripts/gpu-bench scripts/gpu-sweep scripts/gpu_*.py "$stage/"
cp python/tilewise/bench/driver.py "$stage/gpu_driver.py" # what asks the driver needs no torch

if [ -n "$binding" ]; then
  cp -r python/tilewise "$stage/python/"
  strip -o "$stage/python/tilewise/_tilewise.so" "$tree/bindings/torch/_tilewise.so"
  cp -r tests/python "$stage/tests/"
  find "$stage" -name __pycache__ -prune -exec rm -r {} +
  # Wheels without compiled parts, since the GPU machine's Python may be another.
  if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    --platform any --implementation py --abi none --only-binary=:all: \
    --target "$stage/tools" pytest hypothesis; then
    echo "pytest: left out (pip could not fetch it); the Python tests need the GPU machine's own"
  fi
  # pytest colours Python and differences, of the hundreds of languages that come along.
  find "$stage/tools/pygments/lexers" -name '*.py' ! -name '__init__.py' ! -name '_mapping.py' ! -name 'python.py' \
    ! -name 'diff.py' -delete 2>/dev/null || true
else
  echo "PyTorch package: left out (no torch of 2.10 or newer; see -D TILEWISE_TORCH_DIR in scripts/stage.sh)"
fi

echo "$sources" >"$stage/SOURCES.sha256"
python3 scripts/results_status.py --tests >"$stage/TESTS"
cat >"$stage/BUILD.json" <<END
{
  "commit": "$(git describe --always --dirty 2>/dev/null || echo unknown)",
  "cuda": "$(nvcc --version | sed -n 's/.*release [^V]*V//p')",
  "architectures": "$(cached TILEWISE_CUDA_ARCHITECTURES)",
  "kernels": $kernels
}
END

bytes=$(du -sb "$stage" | cut -f1)
echo "$stage: $((bytes / 1000000)) MB; on the GPU machine: ./gpu-test, ./gpu-bench"
for file in "${on_request[@]}"; do # what comes on request does not count
  bytes=$((bytes - $(stat -c %s "$file")))
done
if [ "$bytes" -gt "$most_bytes" ]; then
  echo "That is more than $((most_bytes / 1000000)) MB. Fewer architectures make it smaller." >&2
  exit 1
fi
