#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

#include "attention/validate.h"
#include "cuda/attention/common/key_grid.cuh"
#include "cuda/attention/device_problem.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::test::key_grid_test {
namespace {

// Which tiles of keys a tile of queries meets, as warps find it, as threads do, and as the lists say: with
// more slots than a warp has lanes, full lists and none, ids of tiles and none, beside bands and lengths.

/// In place of keys.tile where meets() says no.
constexpr int unmet = -3;

// A warp a pair of tiles, [B, Hq, query tiles, key tiles].
__global__ void meet_tiles(const __grid_constant__ AttentionCall call, const cuda::QueryGrid queries,
                           const cuda::KeyGrid keys, int* by_warp, int* by_thread, int* faults) {
  const std::int64_t pair = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (pair >= call.problem.batch * call.problem.heads_q * queries.tiles * keys.tiles) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t head = pair / keys.tiles / queries.tiles;
  const cuda::QueryTile query = queries.tile(call, head / call.problem.heads_q, head % call.problem.heads_q,
                                             pair / keys.tiles % queries.tiles);
  cuda::KeyTile one = keys.tile(call, query.sequence, pair % keys.tiles);
  cuda::KeyTile other = one;
  const int together = cuda::meets<true>(call, query, one) ? one.tile : unmet;
  const int alone = cuda::meets<false>(call, query, other) ? other.tile : unmet;
  if (together != __shfl_sync(~0u, together, 0)) atomicAdd(faults, 1);
  if (lane != 31) return;
  by_warp[pair] = together;
  by_thread[pair] = alone;
}

struct Case {
  std::int64_t block_q, block_k;
  bool full, tiles, causal, lengths;
  bool broadcast;  // one list for all entries and heads
  int query_tile, key_tile;
};

std::string describe(const Case& c) {
  return "blocks of " + std::to_string(c.block_q) + " x " + std::to_string(c.block_k) +
         (c.full ? ", full lists" : "") + (c.tiles ? ", tile ids" : "") + (c.causal ? ", causal" : "") +
         (c.lengths ? ", key lengths" : "") + (c.broadcast ? ", one list" : "") + ", tiles of " +
         std::to_string(c.query_tile) + " x " + std::to_string(c.key_tile);
}

constexpr Sizes sizes{.b = 2, .hq = 2, .hkv = 1, .sq = 37, .sk = 331, .d = 8, .dv = 8};
constexpr std::int64_t tile_count = 3;

Buffer integers(const Shape& shape, const std::vector<int>& values) {
  Buffer buffer(DType::i32, shape);
  buffer.set_values(std::vector<double>(values.begin(), values.end()));
  return buffer;
}

/// The lists as vectors, [entries, heads, query blocks] rows of them.
struct Lists {
  std::int64_t entries, heads, rows;
  std::vector<std::vector<int>> some, full;  ///< key blocks
  std::vector<std::vector<int>> ids;         ///< of tiles, beside `some`

  std::size_t row(std::int64_t b, std::int64_t h, std::int64_t qb) const {
    return static_cast<std::size_t>(((entries == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h)) * rows + qb);
  }

  /// What a key block is to a row.
  int state(std::size_t row, int block, const Case& c) const {
    if (c.full && std::find(full[row].begin(), full[row].end(), block) != full[row].end()) return block_full;
    for (std::size_t slot = 0; slot < some[row].size(); ++slot) {
      if (some[row][slot] == block) return c.tiles ? ids[row][slot] : block_full;
    }
    return block_hidden;
  }
};

// Rows of few blocks, of about half of them, and of all, in any order.
Lists random_lists(Random& rng, const Case& c) {
  Lists lists{.entries = c.broadcast ? 1 : sizes.b,
              .heads = c.broadcast ? 1 : sizes.hq,
              .rows = (sizes.sq + c.block_q - 1) / c.block_q,
              .some = {},
              .full = {},
              .ids = {}};
  std::vector<int> blocks(static_cast<std::size_t>((sizes.sk + c.block_k - 1) / c.block_k));
  std::iota(blocks.begin(), blocks.end(), 0);
  for (std::int64_t row = 0; row < lists.entries * lists.heads * lists.rows; ++row) {
    const double density = rng.pick({0.05, 0.5, 0.9, 1.0});
    std::vector<int> some, full, ids;
    rng.shuffle(blocks);
    for (const int block : blocks) {
      if (!rng.chance(density)) continue;
      (c.full && rng.chance(0.5) ? full : some).push_back(block);
    }
    for (std::size_t slot = 0; slot < some.size(); ++slot) {
      ids.push_back(static_cast<int>(rng.between(0, tile_count - 1)));
    }
    lists.some.push_back(some);
    lists.full.push_back(full);
    lists.ids.push_back(ids);
  }
  return lists;
}

// [entries, heads, rows] counts, and so many slots each as the longest row has. What lies past a count looks
// like a block: who does not mind the count finds it.
void set_lists(const Lists& lists, const std::vector<std::vector<int>>& rows, Buffer& counts, Buffer& slots) {
  std::size_t most = 1;
  for (const std::vector<int>& row : rows) most = std::max(most, row.size());
  std::vector<int> sizes_of, entries;
  for (const std::vector<int>& row : rows) {
    sizes_of.push_back(static_cast<int>(row.size()));
    for (std::size_t slot = 0; slot < most; ++slot) {
      entries.push_back(slot < row.size() ? row[slot] : static_cast<int>(slot) % 7);
    }
  }
  counts = integers({lists.entries, lists.heads, lists.rows}, sizes_of);
  slots = integers({lists.entries, lists.heads, lists.rows, static_cast<std::int64_t>(most)}, entries);
}

RandomProblem problem_of(std::uint64_t seed, const Case& c, const Lists& lists) {
  RandomProblem problem = dense_problem(seed, DType::f32, sizes);
  problem.options.causal = c.causal;
  problem.options.alignment = Alignment::bottom_right;
  if (c.lengths) problem.key_lengths = integers({sizes.b}, {203, 20});
  problem.blocks.block_q = c.block_q;
  problem.blocks.block_k = c.block_k;
  set_lists(lists, lists.some, problem.blocks.counts, problem.blocks.indices);
  if (c.full) set_lists(lists, lists.full, problem.blocks.full_counts, problem.blocks.full_indices);
  if (c.tiles) {
    Buffer counts;
    set_lists(lists, lists.ids, counts, problem.blocks.tile_ids);
    std::vector<double> ids = problem.blocks.tile_ids.values();
    for (double& id : ids) id = std::min(id, static_cast<double>(tile_count - 1));
    problem.blocks.tile_ids.set_values(ids);
    problem.blocks.tiles = Buffer(DType::boolean, {tile_count, c.block_q, c.block_k});
    problem.blocks.tiles.fill(1);
  }
  return problem;
}

// Whether some query of a tile sees some of the keys, by band and lengths.
bool in_band(const Case& c, std::int64_t b, std::int64_t first_q, std::int64_t last_q, std::int64_t first_k,
             std::int64_t last_k) {
  const std::int64_t length = !c.lengths ? sizes.sk : b == 0 ? 203 : 20;
  for (std::int64_t i = first_q; i < last_q; ++i) {
    for (std::int64_t j = first_k; j < std::min(last_k, length); ++j) {
      if (!c.causal || j <= i + length - sizes.sq) return true;
    }
  }
  return false;
}

// What a grid says: tiles of that size that stay inside a block, in order.
struct Span {
  std::int64_t first, last, block;
};
std::vector<Span> spans_of(std::int64_t length, std::int64_t block, std::int64_t size) {
  std::vector<Span> spans;
  for (std::int64_t begin = 0; begin < length; begin += block) {
    for (std::int64_t first = begin; first < begin + block; first += size) {
      const std::int64_t last = std::min({first + size, begin + block, length});
      spans.push_back({first, std::max(last, first), begin / block});
    }
  }
  return spans;
}

class CudaKeyGrid : public CudaTest {};

TEST_F(CudaKeyGrid, MeetsWhatTheListsSayByWarpAndByThread) {
  const Case cases[] = {
      // 83 and 331 key blocks: two rounds of a warp and more.
      {.block_q = 5,
       .block_k = 4,
       .full = true,
       .tiles = true,
       .causal = false,
       .lengths = false,
       .broadcast = false,
       .query_tile = 16,
       .key_tile = 16},
      {.block_q = 8,
       .block_k = 1,
       .full = true,
       .tiles = true,
       .causal = true,
       .lengths = true,
       .broadcast = true,
       .query_tile = 3,
       .key_tile = 64},
      {.block_q = 16,
       .block_k = 4,
       .full = false,
       .tiles = true,
       .causal = true,
       .lengths = false,
       .broadcast = false,
       .query_tile = 64,
       .key_tile = 3},
      {.block_q = 37,
       .block_k = 5,
       .full = true,
       .tiles = false,
       .causal = false,
       .lengths = true,
       .broadcast = false,
       .query_tile = 16,
       .key_tile = 2},
      {.block_q = 7,
       .block_k = 10,
       .full = false,
       .tiles = false,
       .causal = true,
       .lengths = true,
       .broadcast = true,
       .query_tile = 4,
       .key_tile = 8},
  };
  std::uint64_t seed = 60;
  std::size_t longest = 0;
  for (const Case& c : cases) {
    SCOPED_TRACE(describe(c));
    Random rng(seed);
    const Lists lists = random_lists(rng, c);
    for (const std::vector<int>& row : lists.some) longest = std::max(longest, row.size());
    const RandomProblem problem = problem_of(seed++, c, lists);
    std::deque<DeviceTensor> memory;
    AttentionInputs inputs = problem.inputs();
    const OutputBuffers outputs = make_outputs(problem);
    move_to_device(tensors_of(inputs), memory);
    const AttentionCall call = checked_forward(
        inputs, problem.options, on_device(outputs.view(), first_device), {.device = first_device});
    const cuda::QueryGrid queries = cuda::QueryGrid::of(call, c.query_tile);
    const cuda::KeyGrid keys = cuda::KeyGrid::of(call, c.key_tile);
    const std::vector<Span> query_spans = spans_of(sizes.sq, c.block_q, c.query_tile);
    const std::vector<Span> key_spans = spans_of(sizes.sk, c.block_k, c.key_tile);
    ASSERT_EQ(queries.tiles, static_cast<std::int64_t>(query_spans.size()));
    ASSERT_EQ(keys.tiles, static_cast<std::int64_t>(key_spans.size()));

    const std::int64_t pairs = sizes.b * sizes.hq * queries.tiles * keys.tiles;
    const Buffer by_warp(DType::i32, {pairs}), by_thread(DType::i32, {pairs});
    const Buffer faults = integers({1}, {0});
    const DeviceTensor warp_gmem(by_warp.view()), thread_gmem(by_thread.view()), faults_gmem(faults.view());
    const auto ints = [](const DeviceTensor& tensor) { return static_cast<int*>(tensor.view().data); };
    constexpr int threads = 128;
    cuda::launch<meet_tiles>(
        {.name = "meeting tiles", .blocks = (pairs * 32 + threads - 1) / threads, .threads = threads}, call,
        queries, keys, ints(warp_gmem), ints(thread_gmem), ints(faults_gmem));
    wait_for_device();
    warp_gmem.download(by_warp.view());
    thread_gmem.download(by_thread.view());
    faults_gmem.download(faults.view());
    EXPECT_EQ(faults.at(0), 0) << "lanes of a warp with other answers";

    std::int64_t pair = 0;
    for (std::int64_t head = 0; head < sizes.b * sizes.hq; ++head) {
      const std::int64_t b = head / sizes.hq;
      for (const Span& query : query_spans) {
        const std::size_t row = lists.row(b, head % sizes.hq, query.block);
        for (const Span& key : key_spans) {
          int expected = lists.state(row, static_cast<int>(key.block), c);
          if (expected == block_hidden || !in_band(c, b, query.first, query.last, key.first, key.last)) {
            expected = unmet;
          }
          ASSERT_EQ(by_warp.at(pair), expected)
              << "by warp, head " << head << ", query " << query.first << ", key " << key.first;
          ASSERT_EQ(by_thread.at(pair), expected)
              << "by thread, head " << head << ", query " << query.first << ", key " << key.first;
          ++pair;
        }
      }
    }
  }
  EXPECT_GT(longest, 64u) << "lists of several rounds";
}

}  // namespace
}  // namespace tilewise::test::key_grid_test
