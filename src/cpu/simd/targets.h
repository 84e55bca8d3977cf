// Which of Highway's targets the CPU kernels are compiled for: on x86 one for each width of vector (others
// differ too little to be worth their compile time), elsewhere the baseline. Include before any of Highway's
// headers.
#pragma once

#if defined(__x86_64__)
#define HWY_DISABLE_PCLMUL_AES  // not used here, and not on every machine that has the vectors
#define HWY_DISABLED_TARGETS (~(HWY_SSE4 | HWY_AVX2 | HWY_AVX3))
#else
#define HWY_COMPILE_ONLY_STATIC
#endif
