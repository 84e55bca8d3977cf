#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/arena.h"
#include "cuda/gemm/few.cuh"
#include "cuda/gemm/product.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/owner.h"
#include "cuda/tile/tensor_map.h"

namespace tilewise::cuda::gemm {

// From a product to the kernel for few rows.

struct FewSpace {
  float* partials;
  std::uint32_t* flags;
};
inline FewSpace take_few_space(Arena& arena, int multiprocessors) {
  return {arena.take<float>(std::int64_t{multiprocessors} * 128 * most_tokens),
          arena.take<std::uint32_t>(std::int64_t{multiprocessors} * FewConfig::consumers)};
}

template <typename T, typename Table, int row>
void run_few_row(const Product& product, const FewSpace& space, int multiprocessors, bool early,
                 cudaStream_t stream) {
  constexpr FewConfig c = Table::rows[row];
  const auto map = [&](const Operand& operand, std::int64_t length, int box) {
    return map_of_matrix(operand.data, product.dtype, length, product.k, operand.stride, box);
  };
  FewMaps maps{.a = map(product.a, product.m, c.tokens), .b = map(product.b, product.n, c.columns())};
  maps.gate = c.gated ? map(product.gate, product.n, c.columns()) : maps.b;
  FewShare share{.row_blocks = static_cast<int>((product.n + c.columns() - 1) / c.columns()),
                 .depth_blocks = static_cast<int>((product.k + c.depth - 1) / c.depth)};
  share.blocks = std::min(multiprocessors, share.total());
  const FewArguments arguments{.share = share,
                               .m = static_cast<int>(product.m),
                               .n = static_cast<int>(product.n),
                               .out = product.out,
                               .epilogue = product.epilogue,
                               .partials = space.partials,
                               .flags = space.flags,
                               .owner = new_owner()};
  launch<few_kernel<T, Table, row>>({.name = "tilewise gemm of few rows",
                                     .blocks = share.blocks,
                                     .threads = c.threads,
                                     .shared_bytes = c.shared_bytes(),
                                     .stream = stream,
                                     .early = early},
                                    maps, arguments);
}

template <typename T, typename Table>
void run_few_suited(const Product& product, const FewSpace& space, int multiprocessors, bool early,
                    cudaStream_t stream) {
  bool done = false;
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((!done && product.m <= Table::rows[row].tokens
          ? (done = true, run_few_row<T, Table, row>(product, space, multiprocessors, early, stream))
          : void()),
     ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
}

}  // namespace tilewise::cuda::gemm
