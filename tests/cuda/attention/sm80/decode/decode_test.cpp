#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "cuda/attention/graph.h"
#include "cuda/attention/sm80/decode/config.h"
#include "property/check.h"

namespace tilewise::test::mma_decode_test {
namespace {

// The decode kernel of `mma`: up to eight query rows per key head, head dims 64 and 128.

class MmaDecode : public CudaKernelFixture<80> {
 protected:
  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "mma",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }
};

using Lengths = std::vector<double>;

void set_lengths(RandomProblem& p, const Lengths& lengths) {
  p.key_lengths = Buffer(DType::i32, {p.batch});
  p.key_lengths.set_values(lengths);
}

// Cuts keys and values into pages, which lie in the pool in a random order. Keys past a length are poisoned,
// and pages that have none are not in the table.
RandomProblem with_pages(RandomProblem p, const Lengths& lengths, std::int64_t page) {
  const std::int64_t slots = p.length_k / page;
  std::vector<std::int64_t> ids(static_cast<std::size_t>(p.batch * slots));
  std::iota(ids.begin(), ids.end(), 0);
  Random rng(p.seed + 1);
  rng.shuffle(ids);
  const Buffer k = std::exchange(p.k, Buffer(p.dtype, {p.batch * slots, p.heads_kv, page, p.dim_qk}));
  const Buffer v = std::exchange(p.v, Buffer(p.dtype, {p.batch * slots, p.heads_kv, page, p.dim_v}));
  p.layout = Layout::paged;
  p.page_table = Buffer(DType::i32, {p.batch, slots});
  set_lengths(p, lengths);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const auto length = static_cast<std::int64_t>(lengths[static_cast<std::size_t>(b)]);
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      const std::int64_t id = ids[static_cast<std::size_t>(b * slots + slot)];
      p.page_table.set({b, slot}, slot * page < length ? static_cast<double>(id) : -1.0);
    }
    for (std::int64_t h = 0; h < p.heads_kv; ++h) {
      for (std::int64_t j = 0; j < length; ++j) {
        const std::int64_t id = ids[static_cast<std::size_t>(b * slots + j / page)];
        for (std::int64_t d = 0; d < p.dim_qk; ++d) p.k.set({id, h, j % page, d}, k.at(b, h, j, d));
        for (std::int64_t d = 0; d < p.dim_v; ++d) p.v.set({id, h, j % page, d}, v.at(b, h, j, d));
      }
    }
  }
  return p;
}

// A problem of forward alone, with causal, a window and sinks in some.
RandomProblem decode_problem(std::uint64_t seed, const Sizes& sizes) {
  RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::f16 : DType::bf16, sizes);
  problem.asked.backward = false;
  problem.options.causal = seed % 3 != 0;
  problem.options.alignment = Alignment::bottom_right;
  if (seed % 4 == 0) problem.options.window = {.left = 20, .right = 0};
  if (seed % 5 == 0) {
    Random rng(seed);
    problem.sinks = Buffer(DType::f32, {sizes.hq});
    problem.sinks.fill_random(rng);
  }
  return problem;
}

// With lengths, an entry sees nothing, one some splits, and one all.
TEST_F(MmaDecode, IsWithinTheContract) {
  std::uint64_t seed = 130;
  for (const std::int64_t dim : {64, 128}) {
    for (const auto& [queries, group] : {std::pair{1, 1}, {1, 8}, {2, 4}, {8, 1}, {3, 2}}) {
      for (const std::int64_t keys : {33, 1100}) {
        RandomProblem problem = decode_problem(
            seed++, {.b = 3, .hq = 2 * group, .hkv = 2, .sq = queries, .sk = keys, .d = dim, .dv = dim});
        expect_within_contract(problem);
        set_lengths(problem, {0, 17, static_cast<double>(keys)});
        expect_within_contract(problem);
      }
    }
  }
}

// A step of 16 keys is a page, or part of one. Windows begin inside a page, and more steps than a ring has
// stages follow each other.
TEST_F(MmaDecode, OfPagesIsWithinTheContract) {
  std::uint64_t seed = 160;
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int64_t page : {16, 48}) {
      for (const auto& [queries, group] : {std::pair{1, 8}, {8, 1}, {1, 3}}) {
        RandomProblem problem = decode_problem(
            seed++, {.b = 3, .hq = 2 * group, .hkv = 2, .sq = queries, .sk = 1104, .d = dim, .dv = dim});
        if (seed % 2 == 0) problem.options.window = {.left = 700, .right = 0};
        expect_within_contract(with_pages(problem, {1104, 0, 533}, page));
      }
    }
  }
}

// Enough heads to fill an H200 without splits. A warp has more steps than its ring has stages.
TEST_F(MmaDecode, OfOneSplitIsWithinTheContract) {
  for (const auto& [dim, keys] : {std::pair{64, 900}, {128, 500}}) {
    const Sizes sizes{.b = 64, .hq = 2, .hkv = 2, .sq = 1, .sk = keys, .d = dim, .dv = dim};
    expect_within_contract(decode_problem(static_cast<std::uint64_t>(dim) + 1, sizes));
  }
}

// Lengths, pages and numbers are data of a graph: each replay reads them again, however often it is repeated.
TEST_F(MmaDecode, GraphsReplayWithOtherLengthsAndPages) {
  const Sizes sizes{.b = 2, .hq = 8, .hkv = 2, .sq = 2, .sk = 1104, .d = 128, .dv = 128};
  for (const bool paged : {false, true}) {
    const auto problem_of = [&](std::uint64_t seed) {
      RandomProblem problem = dense_problem(seed, DType::bf16, sizes);
      problem.asked.backward = false;
      problem.options.causal = true;
      problem.options.alignment = Alignment::bottom_right;
      const Lengths lengths = {static_cast<double>(1104 - seed % 3 * 300),
                               static_cast<double>(seed % 3 * 400)};
      if (paged) return with_pages(std::move(problem), lengths, 16);
      set_lengths(problem, lengths);
      return problem;
    };
    const DeviceProblem captured(problem_of(31), "mma");
    const Stream stream;
    const Graph graph(stream, [&] { captured.forward(stream); });
    for (const std::uint64_t seed : {31, 32, 33}) {
      const DeviceProblem direct(problem_of(seed), "mma");
      direct.poison(stream);
      direct.forward(stream);
      captured.upload(problem_of(seed));
      captured.poison(stream);
      for (int replay = 0; replay < 3; ++replay) graph.replay(stream);
      stream.wait();
      EXPECT_TRUE(captured.outputs() == direct.outputs()) << (paged ? "paged" : "dense") << ", seed " << seed;
    }
  }
}

// The counts that were the fastest, or within noise of that, among those timed on an H200, which has 132 SMs.
TEST(MmaDecodeSplits, AreThoseThatWereFastest) {
  struct Timed {
    std::int64_t key_heads, keys;
    int least, most;
  };
  for (const Timed& timed : {Timed{8, 512, 4, 8},
                             {8, 2048, 16, 16},
                             {8, 4096, 16, 16},
                             {8, 8192, 16, 16},
                             {8, 32768, 16, 16},
                             {8, 131072, 16, 16},
                             {1, 8192, 32, 64},
                             {64, 8192, 2, 2},
                             {128, 4096, 1, 1},
                             {256, 2048, 1, 1},
                             {512, 4096, 1, 1},
                             {1024, 4096, 1, 1}}) {
    const int count = cuda::mma::decode_split_count(timed.key_heads, timed.keys, 132);
    EXPECT_TRUE(count >= timed.least && count <= timed.most)
        << count << " splits for " << timed.key_heads << " key heads of " << timed.keys << " keys";
  }
}

TEST(MmaDecodeSplits, AreAtLeastOneAndFitTheCombineKernel) {
  for (const std::int64_t key_heads : {1, 7, 132, 100000}) {
    for (const std::int64_t keys : {0, 1, 127, 128, 5000, 1 << 30}) {
      for (const int multiprocessors : {1, 20, 132}) {
        const int count = cuda::mma::decode_split_count(key_heads, keys, multiprocessors);
        EXPECT_TRUE(count >= 1 && count <= cuda::mma::most_splits) << key_heads << ", " << keys;
      }
    }
  }
}

}  // namespace
}  // namespace tilewise::test::mma_decode_test
