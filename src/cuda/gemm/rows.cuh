#pragma once

#include <iterator>
#include <utility>

#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/product.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tensor_map.h"

namespace tilewise::cuda::gemm {

// From a product to the row of a tuning table that it runs by.

inline int tiles_of(std::int64_t length, int piece) { return static_cast<int>((length + piece - 1) / piece); }

template <typename T, typename Table, int row>
void run_row(const Product& product, int multiprocessors, cudaStream_t stream) {
  constexpr GemmConfig c = Table::rows[row];
  const auto map = [&](const Operand& operand, std::int64_t length, bool turned, int box) {
    return turned ? map_of_matrix(operand.data, product.dtype, product.k, length, operand.stride, c.depth)
                  : map_of_matrix(operand.data, product.dtype, length, product.k, operand.stride, box);
  };
  const int b_box = c.gated ? c.columns / 2 : c.columns / c.cluster;
  GemmMaps maps{.a = map(product.a, product.m, c.turned_a, c.rows()),
                .b = map(product.b, product.n, c.turned_b, b_box)};
  maps.gate = c.gated ? map(product.gate, product.n, c.turned_b, b_box) : maps.b;
  const int tiles_m = tiles_of(tiles_of(product.m, c.rows()), c.cluster);
  const int tiles_n = tiles_of(product.n, c.out_columns());
  const int clusters = std::min(tiles_m * tiles_n, multiprocessors / c.cluster);
  const GemmArguments arguments{
      .order = TileOrder::of(tiles_m, tiles_n, clusters, c.rows() * c.cluster, c.columns),
      .m = static_cast<int>(product.m),
      .n = static_cast<int>(product.n),
      .k = static_cast<int>(product.k),
      .out = product.out,
      .epilogue = product.epilogue};
  launch<gemm_kernel<T, Table, row>>({.name = "tilewise wgmma gemm",
                                      .blocks = clusters * c.cluster,
                                      .threads = c.threads(),
                                      .shared_bytes = c.shared_bytes(),
                                      .stream = stream,
                                      .cluster = c.cluster},
                                     maps, arguments);
}

/// About how long a row of a table takes, in no unit.
inline double time_of(const Product& product, const GemmConfig& c, int multiprocessors) {
  const int tiles_m = tiles_of(tiles_of(product.m, c.rows()), c.cluster);
  const std::int64_t tiles = static_cast<std::int64_t>(tiles_m) * tiles_of(product.n, c.out_columns());
  const std::int64_t rounds = (tiles + multiprocessors / c.cluster - 1) / (multiprocessors / c.cluster);
  return static_cast<double>(rounds * c.rows() * c.columns) / static_cast<double>(c.speed);
}

template <typename Table>
int choose_row(const Product& product, int multiprocessors) {
  int chosen = 0;
  for (int row = 1; row < static_cast<int>(std::size(Table::rows)); ++row) {
    if (time_of(product, Table::rows[row], multiprocessors) <
        time_of(product, Table::rows[chosen], multiprocessors)) {
      chosen = row;
    }
  }
  return chosen;
}

/// Runs the row that suits; all of the table is compiled.
template <typename T, typename Table>
void run_suited(const Product& product, int multiprocessors, cudaStream_t stream) {
  const int chosen = choose_row<Table>(product, multiprocessors);
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((row == chosen ? run_row<T, Table, row>(product, multiprocessors, stream) : void()), ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
}

}  // namespace tilewise::cuda::gemm
