// What libFuzzer calls. TILEWISE_FUZZ_TARGET is the target of this program.

#include "fuzz/oracle.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tilewise::fuzz::TILEWISE_FUZZ_TARGET({data, size});
  return 0;
}
