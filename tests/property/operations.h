#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tilewise/tensor.h"

namespace tilewise::test {

/// The result of checking a random problem of gemm, ffn, norm, rope or a layer.
struct CheckedOperation {
  struct Passes {
    int forward = 0;
    int backward = 0;
  };
  std::string problem{};  ///< a description
  DType dtype = DType::f32;
  std::map<std::string, Passes> taken{};  ///< by operation and kernel, as "gemm_simd"
  std::vector<std::string> failures{};
};

/// Draws an operation and a problem, and checks that every kernel that can compute it keeps the contract, on
/// the CPU or the first CUDA device. The truth is the reference's result in f64. If `kernels` is not empty,
/// only those are checked.
CheckedOperation check_operation(std::uint64_t seed, Device device, const std::vector<std::string>& kernels);

/// The names of the kernels of all operations.
std::vector<std::string> operation_kernels();

}  // namespace tilewise::test
