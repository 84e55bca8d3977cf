#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tilewise/tensor.h"

namespace tilewise::test {

/// What came of a random problem of gemm, ffn, norm, rope or a layer.
struct CheckedOperation {
  struct Passes {
    int forward = 0;
    int backward = 0;
  };
  std::string problem{};  ///< in words
  DType dtype = DType::f32;
  std::map<std::string, Passes> taken{};  ///< by operation and kernel, as "gemm_simd"
  std::vector<std::string> failures{};
};

/// Draws an operation and a problem of it, and holds every kernel that can take it to the contract, on the
/// CPU or the first CUDA device. The truth is the reference's in f64. Of `kernels` only those are checked, of
/// none all.
CheckedOperation check_operation(std::uint64_t seed, Device device, const std::vector<std::string>& kernels);

/// Names of the kernels of all operations.
std::vector<std::string> operation_kernels();

}  // namespace tilewise::test
