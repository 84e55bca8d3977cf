#pragma once

#include <string>

namespace tilewise::bench {

/// The peak rate of f32 multiply-adds on registers with this many threads, in GFLOP/s: the best of several
/// short bursts. It takes some 50 ms, so it can be measured again whenever the clock may have changed.
double fma_peak_gflops(int threads);
/// The instruction set with which that peak is measured, such as "avx512f".
std::string fma_instructions();

/// The bandwidth of a copy that is larger than the caches, in GB/s. Bytes read and bytes written both count.
double copy_gbps(int threads);

int hardware_threads();
std::string cpu_name();
std::string compiler_name();

}  // namespace tilewise::bench
