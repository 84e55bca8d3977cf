#pragma once

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define TILEWISE_HAS_NVTX 1
#endif

namespace tilewise::cuda {

/// A named range in a profile.
class Range {
 public:
#ifdef TILEWISE_HAS_NVTX
  explicit Range(const char* name) { nvtxRangePushA(name); }
  ~Range() { nvtxRangePop(); }
#else
  explicit Range(const char*) {}
#endif
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace tilewise::cuda
