#include "cuda/tile/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/runtime/check.h"

namespace tilewise::cuda {
namespace {

// The driver's function by way of the runtime, so that nothing is linked with libcuda.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 function = [] {
    constexpr unsigned since = 12000;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, since, cudaEnableDefault, &result),
        "looking for cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess) throw DeviceError("this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

// The stride of a single entry is anything; the driver wants a multiple of 16.
cuuint64_t stride_bytes(std::int64_t stride, std::int64_t extent) {
  return static_cast<cuuint64_t>(extent > 1 ? stride * 2 : 0);
}

template <int rank>
CUtensorMap encode(void* data, DType dtype, const cuuint64_t (&extents)[rank],
                   const cuuint64_t (&strides)[rank - 1], const cuuint32_t (&box)[rank]) {
  cuuint32_t every[rank];
  for (cuuint32_t& one : every) one = 1;
  const CUtensorMapDataType type =
      dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult result = encoder()(&map, type, rank, data, extents, strides, box, every,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw DeviceError("a tensor's map: cuTensorMapEncodeTiled gave " + std::to_string(result));
  }
  return map;
}

}  // namespace

CUtensorMap map_of(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t length,
                   std::int64_t dim, int box_rows) {
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(length),
                                 static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {stride_bytes(rows.stride_s, length), stride_bytes(rows.stride_h, heads),
                                 stride_bytes(rows.stride_b, batch)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  return encode(rows.data, rows.dtype, extents, strides, box);
}

CUtensorMap map_of_groups(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t group,
                          std::int64_t length, std::int64_t dim, int box_rows) {
  const cuuint64_t extents[5] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(group),
                                 static_cast<cuuint64_t>(length), static_cast<cuuint64_t>(heads / group),
                                 static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[4] = {stride_bytes(rows.stride_h, group), stride_bytes(rows.stride_s, length),
                                 stride_bytes(rows.stride_h * group, heads / group),
                                 stride_bytes(rows.stride_b, batch)};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(group), static_cast<cuuint32_t>(box_rows), 1, 1};
  return encode(rows.data, rows.dtype, extents, strides, box);
}

CUtensorMap map_of_matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride, int box_rows, int box_columns) {
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {stride_bytes(stride, rows)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  return encode(const_cast<void*>(data), dtype, extents, strides, box);
}

}  // namespace tilewise::cuda
