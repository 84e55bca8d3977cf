#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace tilewise::cuda {

/// cuBLASLt, if the machine has it. It is loaded when it is first needed, not linked, and its headers are not
/// used: this is the part of its interface that is called, which is the same in versions 12 and 13.
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
  // Values of cuBLASLt's enumerations.
  static constexpr int compute_f32 = 68;
  static constexpr int transpose_a = 3, transpose_b = 4, epilogue = 7,
                       bias_pointer = 8;  // attributes of a description
  static constexpr std::int32_t transposed = 1;
  static constexpr std::uint32_t add_bias = 4;
  static constexpr int most_workspace = 1, reductions = 3,
                       alignment_a = 5;  // attributes of a preference; b, c, d follow a
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

/// Null if it cannot be loaded; then `reason` says why.
const CublasLt* find_cublaslt(std::string* reason = nullptr);

/// The reason why there is no handle for the device; empty if there is one. Determined once per device.
std::string missing_cublaslt(int device);

/// The handle of the current device, created at the first call, even while a stream is being captured. Throws
/// DeviceError if it cannot be created.
CublasLt::Handle cublaslt_handle();

/// Creates a handle with these functions. Returns the reason if that fails.
std::string make_handle(const CublasLt& lt, CublasLt::Handle& handle);

/// Throws DeviceError, with `what` was tried, if the status is not success.
void check_cublaslt(CublasLt::Status status, const char* what);

}  // namespace tilewise::cuda
