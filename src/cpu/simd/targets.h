// The Highway targets that the CPU kernels are compiled for. On x86 there is one per vector width, since
// other targets differ too little to be worth their compile time. Elsewhere it is the baseline. This header
// must be included before any of Highway's.
#pragma once

#if defined(__x86_64__)
#define HWY_DISABLE_PCLMUL_AES  // not used here, and not every machine with these vectors has them
#define HWY_DISABLED_TARGETS (~(HWY_SSE4 | HWY_AVX2 | HWY_AVX3))
#else
#define HWY_COMPILE_ONLY_STATIC
#endif
