#include "cuda/tile/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <string>

#include "cuda/runtime/check.h"

namespace tilewise::cuda {
namespace {

// The driver's function, found through the runtime, so that nothing links with libcuda.
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

cuuint64_t extent(std::int64_t x) { return static_cast<cuuint64_t>(x); }

// A dimension of one entry may have any stride, but the driver requires a multiple of 16.
cuuint64_t stride_bytes(std::int64_t stride, std::int64_t extent) {
  return static_cast<cuuint64_t>(extent > 1 ? stride * 2 : 0);
}

CUtensorMapDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::boolean: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

// Everything that determines a map.
struct Mapped {
  void* data = nullptr;
  DType dtype = DType::bf16;
  int rank = 0;
  cuuint64_t extents[5] = {};
  cuuint64_t strides[4] = {};
  cuuint32_t box[5] = {};
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  friend bool operator==(const Mapped&, const Mapped&) = default;
};

CUtensorMap encode(const Mapped& of) {
  constexpr cuuint32_t every[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, type_of(of.dtype), static_cast<cuuint32_t>(of.rank), of.data, of.extents, of.strides,
                of.box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, of.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw DeviceError("cuTensorMapEncodeTiled failed with status " + std::to_string(result));
  }
  return map;
}

// A cache of maps, since finding one takes less time than encoding it. Layers of a network and calls of a
// loop often have their tensors at the same addresses. A map does not depend on the thread, so all threads
// share the cache. A thread that finds an entry in use by another thread encodes a map for itself.
CUtensorMap encoded(const Mapped& of) {
  struct Kept {
    std::atomic_flag in_use;
    Mapped of;
    CUtensorMap map;
  };
  static std::array<Kept, 256> kept{};
  const auto address = reinterpret_cast<std::uintptr_t>(of.data);
  Kept& place = kept[((address >> 8) ^ (address >> 15) ^ of.box[1]) % kept.size()];
  if (place.in_use.test_and_set(std::memory_order_acquire)) return encode(of);
  const bool found = place.of == of;
  CUtensorMap map = place.map;
  place.in_use.clear(std::memory_order_release);
  if (found) return map;
  map = encode(of);
  if (place.in_use.test_and_set(std::memory_order_acquire)) return map;
  place.of = of;
  place.map = map;
  place.in_use.clear(std::memory_order_release);
  return map;
}

}  // namespace

CUtensorMap map_of(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t length,
                   std::int64_t dim, int box_rows) {
  return encoded({.data = rows.data,
                  .dtype = rows.dtype,
                  .rank = 4,
                  .extents = {extent(dim), extent(length), extent(heads), extent(batch)},
                  .strides = {stride_bytes(rows.stride_s, length), stride_bytes(rows.stride_h, heads),
                              stride_bytes(rows.stride_b, batch)},
                  .box = {64, static_cast<cuuint32_t>(box_rows), 1, 1}});
}

CUtensorMap map_of_groups(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t group,
                          std::int64_t length, std::int64_t dim, int box_rows) {
  return encoded(
      {.data = rows.data,
       .dtype = rows.dtype,
       .rank = 5,
       .extents = {extent(dim), extent(group), extent(length), extent(heads / group), extent(batch)},
       .strides = {stride_bytes(rows.stride_h, group), stride_bytes(rows.stride_s, length),
                   stride_bytes(rows.stride_h * group, heads / group), stride_bytes(rows.stride_b, batch)},
       .box = {64, static_cast<cuuint32_t>(group), static_cast<cuuint32_t>(box_rows), 1, 1}});
}

CUtensorMap map_of_mask(const MaskView& mask, const AttentionProblem& problem, int box_rows, int box_keys) {
  const auto size = static_cast<int>(size_of(mask.dtype));
  const auto bytes = [&](std::int64_t stride) { return static_cast<cuuint64_t>(stride * size); };
  const int row_bytes = std::min(128, box_keys * size);
  return encoded({.data = mask.data,
                  .dtype = mask.dtype,
                  .rank = 4,
                  .extents = {extent(problem.length_k), extent(problem.length_q), extent(problem.heads_q),
                              extent(problem.batch)},
                  .strides = {bytes(mask.stride[2]), bytes(mask.stride[1]), bytes(mask.stride[0])},
                  .box = {static_cast<cuuint32_t>(row_bytes / size), static_cast<cuuint32_t>(box_rows), 1, 1},
                  .swizzle = row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B});
}

CUtensorMap map_of_tiles(const BlockView& blocks, int box_keys) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();  // ids are no larger
  const auto bytes = [](std::int64_t stride, std::int64_t extent) {
    return static_cast<cuuint64_t>(extent > 1 ? stride : 0);
  };
  const std::int64_t tiles = std::min(blocks.tile_count, most);
  return encoded(
      {.data = const_cast<std::byte*>(blocks.tiles),
       .dtype = DType::boolean,
       .rank = 4,
       .extents = {extent(blocks.block_k), extent(blocks.block_q), extent(tiles), 1},
       .strides = {bytes(blocks.tile_stride[1], blocks.block_q), bytes(blocks.tile_stride[0], tiles), 0},
       .box = {static_cast<cuuint32_t>(std::min(128, box_keys)), 64, 1, 1},
       .swizzle = box_keys >= 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B});
}

CUtensorMap map_of_matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride, int box_rows, int box_columns) {
  return encoded({.data = const_cast<void*>(data),
                  .dtype = dtype,
                  .rank = 2,
                  .extents = {extent(columns), extent(rows)},
                  .strides = {stride_bytes(stride, rows)},
                  .box = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}});
}

CUtensorMap map_of_panels(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride, int box_rows, int box_panels) {
  constexpr int panel = 64;
  return encoded({.data = const_cast<void*>(data),
                  .dtype = dtype,
                  .rank = 3,
                  .extents = {panel, extent(rows), extent(columns / panel)},
                  .strides = {stride_bytes(stride, rows), 2 * panel},
                  .box = {panel, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_panels)}});
}

}  // namespace tilewise::cuda
