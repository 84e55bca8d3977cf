#include "cuda/runtime/range.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define TILEWISE_HAS_NVTX 1
#endif

namespace tilewise::cuda {

#ifdef TILEWISE_HAS_NVTX
Range::Range(const char* name) { nvtxRangePushA(name); }
Range::~Range() { nvtxRangePop(); }
#else
Range::Range(const char*) {}
Range::~Range() = default;
#endif

}  // namespace tilewise::cuda
