// Which of Highway's targets the CPU kernels are compiled for: one for each width of vector. Others differ
// too little to be worth their compile time. Include before any of Highway's headers.
#pragma once

#define HWY_DISABLE_PCLMUL_AES  // not used here, and not on every machine that has the vectors
#define HWY_DISABLED_TARGETS (~(HWY_SSE4 | HWY_AVX2 | HWY_AVX3 | HWY_NEON))
