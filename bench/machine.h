#pragma once

#include <string>

namespace tilewise::bench {

/// f32 GFLOP/s of fused multiply-adds on registers alone, over so many threads: the best of several short
/// bursts. Cheap enough (some 50 ms) to be asked again whenever the clock may have moved.
double fma_peak_gflops(int threads);
/// The instructions that peak was reached with, such as "avx512f".
std::string fma_instructions();

/// GB/s of a copy larger than the caches, bytes read and bytes written both counted.
double copy_gbps(int threads);

int hardware_threads();
std::string cpu_name();
std::string compiler_name();

}  // namespace tilewise::bench
