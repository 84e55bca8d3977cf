#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "attention/validate.h"
#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/device_problem.h"
#include "cuda/runtime/launch.cuh"
#include "support/open_problem.h"

namespace tilewise::test::tile_test {
namespace {

// The pieces that every kernel shares, walked through as kernels do and compared with the contract as
// OpenProblem reads it: which pairs are computed and shown, their scores, and what dropout makes of them.

/// What is known of each pair, [B, Hq, Sq, Sk].
struct Pairs {
  int* visits;     ///< how many key tiles it was in
  int* shown;      ///< whether it is not hidden
  float* score;    ///< from `product`
  float* dropout;  ///< factor of its weight
  const float* product;
  int* faults;  ///< one counter
  std::int64_t length_q,
      length_k;  ///< as the problem has them; a call of packed sequences has no more than rows
};

// A block a query tile, a thread a query.
__global__ void walk_tiles(const __grid_constant__ AttentionCall call, const cuda::QueryGrid grid,
                           const int key_tile_size, const Pairs pairs) {
  const std::int64_t head = blockIdx.x / grid.tiles;
  const std::int64_t b = head / call.problem.heads_q;
  const std::int64_t h = head % call.problem.heads_q;
  const cuda::QueryTile query = grid.tile(call, b, h, blockIdx.x % grid.tiles);
  const cuda::ScoreRule rules(call, b, h);
  const KeyRange any = query.any(call);
  const KeyRange all = query.all(call);
  if (query.count <= 0) return;
  cuda::KeyTiles<true> tiles(call, query, key_tile_size);
  for (cuda::KeyTile keys = tiles.next(); keys.count > 0; keys = tiles.next()) {
    if (keys.count > key_tile_size || keys.first < any.first || keys.first + keys.count > any.last) {
      atomicAdd(pairs.faults, 1);
      return;
    }
    for (std::int64_t i = query.first + threadIdx.x; i < query.first + query.count; i += blockDim.x) {
      for (std::int64_t j = keys.first; j < keys.first + keys.count; ++j) {
        const std::int64_t at = (head * pairs.length_q + i) * pairs.length_k + j;
        const bool hidden = cuda::hidden(call, query.sequence, keys, i, j);
        const bool inside = j >= all.first && j < all.last && keys.tile < 0;  // what needs no such question
        if (hidden && inside) atomicAdd(pairs.faults, 1);
        float tangent = 0;
        pairs.visits[at] += 1;
        pairs.shown[at] = !hidden;
        pairs.score[at] = cuda::score_of(call, rules, query.sequence, b, h, i, j, pairs.product[at], tangent);
        pairs.dropout[at] = cuda::dropout_factor(call, b, h, i, j);
        const cuda::DropoutFactors four(call, b, h, i, j / 4 * 4);
        if (four.factor[j % 4] != pairs.dropout[at]) atomicAdd(pairs.faults, 1);
      }
    }
  }
}

// The same on the host.
struct HostPairs {
  std::vector<int> visits, shown;
  std::vector<float> score, dropout, product;
  std::vector<int> faults{0};

  HostPairs(const RandomProblem& problem, std::uint64_t seed) {
    const auto count =
        static_cast<std::size_t>(problem.batch * problem.heads_q * problem.length_q * problem.length_k);
    visits.resize(count);
    shown.resize(count);
    score.resize(count);
    dropout.resize(count);
    Random rng(seed);
    for (std::size_t n = 0; n < count; ++n) product.push_back(static_cast<float>(8 * rng.normal()));
  }
};

template <typename T>
Tensor tensor_of(std::vector<T>& values) {
  static_assert(sizeof(T) == 4);
  const std::int64_t shape[] = {static_cast<std::int64_t>(values.size())};
  return Tensor(values.data(), DType::i32, shape);
}

void walk_on_device(const RandomProblem& problem, int query_tile_size, int key_tile_size, HostPairs& pairs) {
  std::deque<DeviceTensor> memory;
  AttentionInputs inputs = problem.inputs();
  const OutputBuffers outputs = make_outputs(problem);
  move_to_device(tensors_of(inputs), memory);
  const AttentionCall call = checked_forward(inputs, problem.options, on_device(outputs.view(), first_device),
                                             {.device = first_device});

  const auto on_device = [&](auto& values) {
    return reinterpret_cast<decltype(values.data())>(memory.emplace_back(tensor_of(values)).view().data);
  };
  const std::size_t first = memory.size();
  const Pairs device_pairs{.visits = on_device(pairs.visits),
                           .shown = on_device(pairs.shown),
                           .score = on_device(pairs.score),
                           .dropout = on_device(pairs.dropout),
                           .product = on_device(pairs.product),
                           .faults = on_device(pairs.faults),
                           .length_q = problem.length_q,
                           .length_k = problem.length_k};
  const cuda::QueryGrid grid = cuda::QueryGrid::of(call, query_tile_size);
  cuda::launch<walk_tiles>(
      {.name = "walking over tiles", .blocks = problem.batch * problem.heads_q * grid.tiles, .threads = 32},
      call, grid, key_tile_size, device_pairs);
  wait_for_device();
  auto result = memory.begin() + static_cast<std::ptrdiff_t>(first);
  for (const Tensor& host : {tensor_of(pairs.visits), tensor_of(pairs.shown), tensor_of(pairs.score),
                             tensor_of(pairs.dropout), tensor_of(pairs.product), tensor_of(pairs.faults)}) {
    (result++)->download(host);
  }
}

// The score in f64, and what f32 may be off: eight roundings (a product with the scale, tanh to two units in
// the last place, a product with the cap, ALiBi's product, two additions) of numbers no larger than these.
struct Score {
  double value;
  double tolerance;
};
Score score_in_f64(const OpenProblem& open, const Head& head, std::size_t pair, float product) {
  constexpr double unit = 0x1p-23;
  const auto cap = static_cast<double>(open.problem.options.softcap);
  const double scaled = open.scale * head.logit_scale * static_cast<double>(product);
  const double capped = cap > 0 ? cap * std::tanh(scaled / cap) : scaled;
  return {capped + head.alibi_at(pair) + head.mask_at(pair),
          8 * unit * (std::abs(scaled) + cap + std::abs(head.alibi_at(pair)) + std::abs(head.mask_at(pair)))};
}

void expect_contract(const RandomProblem& problem, const HostPairs& pairs) {
  EXPECT_EQ(pairs.faults.front(), 0) << "tiles out of bounds, or two readings of dropout";
  const OpenProblem open(problem);
  std::int64_t index = 0;
  open.for_each_head([&](const Head& head) {
    const auto first = static_cast<std::size_t>(index++ * problem.length_q * problem.length_k);
    for (std::int64_t i = 0; i < problem.length_q; ++i) {
      for (std::int64_t j = 0; j < problem.length_k; ++j) {
        const std::size_t at = first + static_cast<std::size_t>(i * problem.length_k + j);
        const bool exists =
            i < static_cast<std::int64_t>(head.queries) && j < static_cast<std::int64_t>(head.keys);
        const std::size_t pair =
            exists ? head.pair(static_cast<std::size_t>(i), static_cast<std::size_t>(j)) : 0;
        const bool visible = exists && head.visible[pair] != 0;
        const bool minus_infinity = pairs.score[at] == -std::numeric_limits<float>::infinity();
        ASSERT_LE(pairs.visits[at], exists ? 1 : 0) << "pair " << i << ", " << j;
        ASSERT_EQ(pairs.visits[at] == 1 && pairs.shown[at] == 1 && !minus_infinity, visible)
            << "pair " << i << ", " << j << " of head " << index - 1;
        if (!visible) continue;
        const Score score = score_in_f64(open, head, pair, pairs.product[at]);
        ASSERT_NEAR(static_cast<double>(pairs.score[at]), score.value, score.tolerance);
        ASSERT_EQ(static_cast<double>(pairs.dropout[at]), head.keep_at(pair))
            << "dropout of " << i << ", " << j;
      }
    }
  });
}

class CudaTiles : public CudaTest {};

TEST_F(CudaTiles, WalkOverTheContractsPairsOnce) {
  int dense = 0, packed = 0, paged = 0, blocks = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const RandomProblem problem = random_problem(seed);
    SCOPED_TRACE(to_string(problem));
    Random rng(seed + 5);
    const int query_tile_size = rng.pick({1, 16, 33, 64, 128});
    const int key_tile_size = rng.pick({1, 16, 33, 64, 128});
    SCOPED_TRACE("tiles of " + std::to_string(query_tile_size) + " queries and " +
                 std::to_string(key_tile_size) + " keys");
    HostPairs pairs(problem, seed + 6);
    walk_on_device(problem, query_tile_size, key_tile_size, pairs);
    expect_contract(problem, pairs);
    if (HasFatalFailure()) return;
    dense += problem.layout == Layout::dense;
    packed += problem.layout == Layout::packed;
    paged += problem.layout == Layout::paged;
    blocks += problem.blocks.counts.given();
  }
  EXPECT_TRUE(dense > 0 && packed > 0 && paged > 0 && blocks > 0) << "the problems are of all layouts";
}

}  // namespace
}  // namespace tilewise::test::tile_test
