#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/device_tensors.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "support/random.h"

namespace tilewise::test::matrix_test {
namespace {

// Tiles of 16-bit elements and products of them, as the kernels on tensor cores use them: loaded by either
// loader, read as either factor, and multiplied. Elements are small integers, so that results are exact.

constexpr int tile_rows = 64;
constexpr int threads = 128;

/// The operands of one block: `a` and `b`, [tile_rows, dims] with rows `stride` elements apart, of which
/// `valid` are there.
template <typename T>
struct Operands {
  const T* a;
  const T* b;
  int stride, valid, dims;
  bool strided;  ///< by load_strided_rows
};

// a·bᵀ, [tile_rows, tile_rows], and c·b, [tile_rows, dim], where c is that product as 16-bit elements, taken
// from registers as attention's weights are. A warp has 16 rows.
template <typename T, int dim>
__global__ void multiply_tiles(const Operands<T> operands, float* products, float* results) {
#if __CUDA_ARCH__ >= 800
  using namespace cuda;
  using Tile = SwizzledTile<dim>;
  __shared__ __align__(128) std::byte a_smem[tile_rows * Tile::row_bytes];
  __shared__ __align__(128) std::byte b_smem[tile_rows * Tile::row_bytes];
  const auto load = [&](std::byte* to, const T* from) {
    const auto* first = reinterpret_cast<const std::byte*>(from);
    if (operands.strided) {
      load_strided_rows<tile_rows, dim, threads>(to, first, operands.stride * 2, operands.valid,
                                                 operands.dims);
    } else {
      const bool aligned = (reinterpret_cast<std::uintptr_t>(first) | operands.stride * 2) % 16 == 0;
      load_any_rows<tile_rows, dim, threads>(
          to, [&](int r) { return first + r * operands.stride * 2; }, aligned, operands.valid, operands.dims);
    }
  };
  load(a_smem, operands.a);
  load(b_smem, operands.b);
  commit_copies();
  wait_copies<0>();
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const auto address = [](const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  };
  const auto a = MatrixPointer<dim>::by_rows(address(a_smem + warp * 16 * Tile::row_bytes));
  const auto b_columns = MatrixPointer<dim>::by_columns(address(b_smem));
  const auto b_rows = MatrixPointer<dim>::by_rows(address(b_smem));

  float c[tile_rows / 8][4] = {};
  for (int step = 0; step < dim / 16; ++step) {
    std::uint32_t left[4];
    load_matrices(left, a.at(0, step));
#pragma unroll
    for (int n = 0; n < tile_rows / 16; ++n) {
      std::uint32_t right[4];
      load_matrices(right, b_columns.at(16 * n, step));
      multiply_matrices<T>(c[2 * n], left, right[0], right[1]);
      multiply_matrices<T>(c[2 * n + 1], left, right[2], right[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < tile_rows / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      products[(16 * warp + g + e / 2 * 8) * tile_rows + 8 * n + 2 * t + e % 2] = c[n][e];
    }
  }
  float d[dim / 8][4] = {};
#pragma unroll
  for (int step = 0; step < tile_rows / 16; ++step) {
    const float(&low)[4] = c[2 * step];
    const float(&high)[4] = c[2 * step + 1];
    const std::uint32_t left[4] = {pack<T>(low[0], low[1]), pack<T>(low[2], low[3]),
                                   pack<T>(high[0], high[1]), pack<T>(high[2], high[3])};
#pragma unroll
    for (int n = 0; n < dim / 16; ++n) {
      std::uint32_t right[4];
      load_matrices_transposed(right, b_rows.at(16 * step, n));
      multiply_matrices<T>(d[2 * n], left, right[0], right[1]);
      multiply_matrices<T>(d[2 * n + 1], left, right[2], right[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < dim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      results[(16 * warp + g + e / 2 * 8) * dim + 8 * n + 2 * t + e % 2] = d[n][e];
    }
  }
#endif
}

class Matrices : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    if (cuda::device_properties(0).compute_capability < 80) GTEST_SKIP() << "needs compute capability 8.0";
  }
};

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const auto* first = reinterpret_cast<const std::byte*>(values.data());
  return {first, first + values.size() * sizeof(T)};
}

// Integers of at most 1, so that sums of 256 products stay below 2^8 and are exact in bf16.
template <typename T, int dim>
void expect_products(int stride, int offset, int valid, int dims, bool strided) {
  SCOPED_TRACE("dim " + std::to_string(dim) + ", stride " + std::to_string(stride) + ", offset " +
               std::to_string(offset) + ", " + std::to_string(valid) + " rows of " + std::to_string(dims) +
               (strided ? ", strided" : ""));
  Random rng(static_cast<std::uint64_t>(dim + stride + offset + valid + dims));
  const auto size = static_cast<std::size_t>(offset + tile_rows * stride);
  std::vector<T> a(size, T(0.0f)), b(size, T(0.0f));
  for (std::vector<T>* values : {&a, &b}) {
    for (T& value : *values) value = T(static_cast<float>(rng.between(-1, 1)));
  }
  const auto at = [&](const std::vector<T>& values, int row, int column) {
    if (row >= valid || column >= dims) return 0.0f;
    return static_cast<float>(values[static_cast<std::size_t>(offset + row * stride + column)]);
  };
  const DeviceMemory a_gmem(size * sizeof(T)), b_gmem(size * sizeof(T));
  const DeviceMemory products_gmem(tile_rows * tile_rows * 4), results_gmem(tile_rows * dim * 4);
  copy_to_device(a_gmem.data(), bytes_of(a));
  copy_to_device(b_gmem.data(), bytes_of(b));
  const Operands<T> operands{.a = reinterpret_cast<const T*>(a_gmem.data()) + offset,
                             .b = reinterpret_cast<const T*>(b_gmem.data()) + offset,
                             .stride = stride,
                             .valid = valid,
                             .dims = dims,
                             .strided = strided};
  cuda::launch<multiply_tiles<T, dim>>({.name = "products of tiles", .blocks = 1, .threads = threads},
                                       operands, reinterpret_cast<float*>(products_gmem.data()),
                                       reinterpret_cast<float*>(results_gmem.data()));
  wait_for_device();
  std::vector<float> products(tile_rows * tile_rows), results(tile_rows * dim);
  copy_to_host(std::as_writable_bytes(std::span(products)), products_gmem.data());
  copy_to_host(std::as_writable_bytes(std::span(results)), results_gmem.data());

  for (int i = 0; i < tile_rows; ++i) {
    for (int j = 0; j < tile_rows; ++j) {
      float sum = 0;
      for (int n = 0; n < dims; ++n) sum += at(a, i, n) * at(b, j, n);
      ASSERT_EQ(products[static_cast<std::size_t>(i * tile_rows + j)], sum) << "product " << i << ", " << j;
    }
    for (int n = 0; n < dim; ++n) {
      float sum = 0;
      for (int j = 0; j < tile_rows; ++j) {
        sum += products[static_cast<std::size_t>(i * tile_rows + j)] * at(b, j, n);
      }
      ASSERT_EQ(results[static_cast<std::size_t>(i * dim + n)], sum) << "result " << i << ", " << n;
    }
  }
}

template <typename T, int dim>
void expect_products_of_all_kinds() {
  for (const bool strided : {false, true}) {
    expect_products<T, dim>(dim, 0, tile_rows, dim, strided);
    expect_products<T, dim>(dim + 8, 16, tile_rows, dim, strided);
    expect_products<T, dim>(dim, 0, 37, dim, strided);
    expect_products<T, dim>(dim + 24, 8, tile_rows, dim - 5, strided);
    expect_products<T, dim>(dim, 8, 1, 3, strided);
  }
  expect_products<T, dim>(dim + 1, 0, tile_rows, dim, false);
  expect_products<T, dim>(dim - 3, 5, 50, dim - 9, false);
}

TEST_F(Matrices, OfSwizzledTilesMultiplyExactly) {
  expect_products_of_all_kinds<__nv_bfloat16, 32>();
  expect_products_of_all_kinds<__nv_bfloat16, 64>();
  expect_products_of_all_kinds<__nv_bfloat16, 96>();
  expect_products_of_all_kinds<__nv_bfloat16, 128>();
  expect_products_of_all_kinds<__half, 64>();
  expect_products_of_all_kinds<__half, 96>();
  expect_products_of_all_kinds<__half, 192>();
}

// Places of chunks: every chunk of a row has one, and those of eight rows that are read together share no
// bank.
template <int dim>
void expect_places() {
  using Tile = cuda::SwizzledTile<dim>;
  for (int row = 0; row < 32; ++row) {
    std::vector<int> taken(Tile::chunks, 0);
    for (int chunk = 0; chunk < Tile::chunks; ++chunk) {
      const int place = Tile::offset(row, chunk) - row * Tile::row_bytes;
      ASSERT_TRUE(place >= 0 && place < Tile::row_bytes && place % 16 == 0);
      ++taken[static_cast<std::size_t>(place / 16)];
      std::vector<int> banks(8, 0);
      for (int r = row / 8 * 8; r < row / 8 * 8 + 8; ++r) {
        ++banks[static_cast<std::size_t>(Tile::offset(r, chunk) / 16 % 8)];
      }
      EXPECT_EQ(banks, std::vector<int>(8, 1)) << "dim " << dim << ", chunk " << chunk;
    }
    EXPECT_EQ(taken, std::vector<int>(Tile::chunks, 1));
  }
}

TEST(SwizzledTile, GivesEveryChunkAPlaceAndEightRowsAllBanks) {
  expect_places<32>();
  expect_places<64>();
  expect_places<96>();
  expect_places<128>();
  expect_places<192>();
  expect_places<256>();
}

}  // namespace
}  // namespace tilewise::test::matrix_test
