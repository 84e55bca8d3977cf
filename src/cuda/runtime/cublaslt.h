#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace tilewise::cuda {

/// cuBLASLt, where the machine has it. It is looked for when first needed, and neither linked nor built with:
/// what stands here is the part of its interface that is called, the same in versions 12 and 13.
struct CublasLt {
  using Status = int;  ///< 0 is success
  using Handle = struct HandleOf*;
  using Description = struct DescriptionOf*;  ///< of a product
  using Layout = struct LayoutOf*;            ///< of a matrix
  using Preference = struct PreferenceOf*;
  struct Algorithm {
    std::uint64_t data[8];
  };
  struct Choice {
    Algorithm algorithm;
    std::size_t workspace;
    Status status;
    float waves;
    int reserved[4];
  };
  // Values of its enumerations.
  static constexpr int compute_f32 = 68;
  static constexpr int transpose_a = 3, transpose_b = 4, epilogue = 7, bias_pointer = 8;  // description's
  static constexpr std::int32_t transposed = 1;
  static constexpr std::uint32_t add_bias = 4;
  static constexpr int most_workspace = 1, reductions = 3, alignment_a = 5;  // preference's; b, c, d follow a
  static constexpr std::uint32_t reduce_in_f32 = 2;

  Status (*create)(Handle*);
  Status (*create_description)(Description*, int compute, int scale_type);
  Status (*set_description)(Description, int attribute, const void*, std::size_t);
  Status (*destroy_description)(Description);
  Status (*create_layout)(Layout*, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t stride);
  Status (*destroy_layout)(Layout);
  Status (*create_preference)(Preference*);
  Status (*set_preference)(Preference, int attribute, const void*, std::size_t);
  Status (*destroy_preference)(Preference);
  Status (*choose)(Handle, Description, Layout a, Layout b, Layout c, Layout d, Preference, int asked,
                   Choice*, int* found);
  Status (*multiply)(Handle, Description, const void* alpha, const void* a, Layout, const void* b, Layout,
                     const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*,
                     void* workspace, std::size_t, cudaStream_t);
};

/// Null where there is none; then `reason` says why.
const CublasLt* find_cublaslt(std::string* reason = nullptr);

/// Empty where the library has a handle for the device, else why it has none. Both are found out once.
std::string missing_cublaslt(int device);

/// The handle of the current device, made when first asked for, also while a stream is captured. Throws
/// DeviceError where it cannot be made.
CublasLt::Handle cublaslt_handle();

/// Makes a handle with those functions; gives the reason where that fails.
std::string make_handle(const CublasLt& lt, CublasLt::Handle& handle);

/// Throws DeviceError naming what was tried.
void check_cublaslt(CublasLt::Status status, const char* what);

}  // namespace tilewise::cuda
