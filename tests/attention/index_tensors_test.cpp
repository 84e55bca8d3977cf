#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "attention/index_rules.h"
#include "attention/validate.h"
#include "support/device.h"
#include "support/garbage.h"

// Kernels read index tensors through the functions that are tested here, on a device where nobody has looked
// at the numbers. The same functions run on the host.

namespace tilewise::test::index_tensors_test {
namespace {

constexpr Device device{Device::Type::cuda, 0};

/// A call as for a device: nothing was read. Its tensors are in the host's memory.
AttentionCall device_call(const RandomProblem& p) {
  return checked_inputs(Pass::forward, on_device(p.inputs(), device), p.options, {.device = device});
}

RandomProblem problem_of(std::uint64_t seed) {
  return seed % 16 == 0 ? random_mma_problem(seed) : random_problem(seed);
}

TEST(IndexTensors, StartsOfSequencesAreInsideWhateverTheNumbersAre) {
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random rng(seed);
    const std::int64_t sequences = rng.between(0, 9);
    const std::int64_t rows = rng.between(0, 40);
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(sequences + 1));
    for (std::int32_t& number : numbers) number = static_cast<std::int32_t>(garbage_index(rng, rows));
    const bool valid = rng.chance(0.3);
    if (valid) {
      for (std::int32_t& number : numbers) number = static_cast<std::int32_t>(rng.between(0, rows));
      std::sort(numbers.begin(), numbers.end());
      numbers[0] = 0;
    }
    const Starts starts{{numbers.data(), {1}}, sequences, rows, valid ? rows : rng.between(0, 40)};
    const auto has = [&](std::int64_t n, std::int64_t row) {
      return starts.at(n) <= row && row < starts.at(n) + starts.length(n);
    };
    for (std::int64_t n = 0; n < sequences; ++n) {
      ASSERT_GE(starts.at(n), 0);
      ASSERT_GE(starts.length(n), 0);
      ASSERT_LE(starts.length(n), starts.longest);
      ASSERT_LE(starts.at(n) + starts.length(n), rows);
      ASSERT_TRUE(!valid || starts.length(n) == numbers[static_cast<std::size_t>(n + 1)] - starts.at(n));
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      bool any = false;
      for (std::int64_t n = 0; n < sequences; ++n) any = any || has(n, row);
      // A row that is said to be somebody's is computed; one that is not is cleared.
      ASSERT_TRUE(any || !starts.own(row)) << row;
      ASSERT_TRUE(!valid || starts.own(row) == any) << row;
    }
  }
}

/// Whether an element of a tensor begins at an address, in the bytes from its first element to its last.
bool is_inside(const Tensor& tensor, const std::byte* at) {
  const auto width = static_cast<std::int64_t>(size_of(tensor.dtype));
  std::int64_t low = 0, high = 0;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    const std::int64_t reach = (tensor.extent(dim) - 1) * tensor.stride(dim) * width;
    (reach < 0 ? low : high) += reach;
  }
  const std::int64_t offset = at - static_cast<const std::byte*>(tensor.data);
  return tensor.size() > 0 && offset >= low && offset <= high;
}

TEST(IndexTensors, RowsOfQueriesAndKeysAreInside) {
  int looked_at = 0;
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomProblem p = garbled(problem_of(seed));
    if (!has_indices(p) || p.heads_kv == 0) continue;
    const AttentionInputs inputs = p.inputs();
    const AttentionCall call = device_call(p);
    for (std::int64_t b = 0; b < call.problem.batch; ++b) {
      const Sequence s = call.sequence(b);
      ASSERT_TRUE(s.length_q >= 0 && s.length_q <= call.problem.length_q);
      ASSERT_TRUE(s.length_k >= 0 && s.length_k <= call.problem.length_k);
      ASSERT_LE(call.first_row_q(b) + s.length_q, call.rows_q());
      ASSERT_LE(call.first_row_k(b) + s.length_k, call.rows_k());
      for (std::int64_t i = 0; i < s.length_q; i += std::max<std::int64_t>(1, s.length_q / 5)) {
        ASSERT_TRUE(is_inside(inputs.q, call.q.at(b, 0, s.first_q + i)));
        const KeyRange seen = call.keys_of(s, i);
        for (std::int64_t j = seen.first; j < seen.last; j += 7) {
          ASSERT_TRUE(is_inside(inputs.k, call.key_row(call.k, s, b, 0, j)));
          ASSERT_TRUE(is_inside(inputs.v, call.key_row(call.v, s, b, 0, j)));
          ++looked_at;
        }
      }
    }
  }
  EXPECT_GT(looked_at, 1000);
}

TEST(IndexTensors, BlocksAndTilesAreInside) {
  int looked_at = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomProblem p = garbled(problem_of(seed));
    if (!p.blocks.counts.given()) continue;
    const AttentionInputs inputs = p.inputs();
    const AttentionCall call = device_call(p);
    const BlockView& blocks = call.blocks;
    for (std::int64_t row = 0; row < inputs.blocks.counts.extent(2); ++row) {
      for (std::int64_t b = 0; b < p.batch; ++b) {
        ASSERT_TRUE(blocks.count(b, 0, row) >= 0 && blocks.count(b, 0, row) <= blocks.slots);
        for (std::int32_t slot = 0; slot < blocks.count(b, 0, row); ++slot) {
          const std::int32_t tile = blocks.tile(b, 0, row, slot);
          ASSERT_TRUE(tile == block_full ||
                      (inputs.blocks.tiles.given() && tile >= 0 && tile < inputs.blocks.tiles.extent(0)));
          ++looked_at;
        }
        if (blocks.full_counts.data == nullptr) continue;
        ASSERT_TRUE(blocks.full_count(b, 0, row) >= 0 && blocks.full_count(b, 0, row) <= blocks.full_slots);
      }
    }
  }
  EXPECT_GT(looked_at, 100);
}

/// What a call says; empty where it is taken.
template <typename Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

// A device looks at all items at once, by searching where the CPU has marks, and reports the first: as here.
TEST(IndexTensors, ADeviceFindsTheFaultThatTheCpuFinds) {
  int faults = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomProblem p = problem_of(seed);
    if (!has_indices(p)) continue;
    if (seed % 3 != 0) p = garbled(std::move(p));
    const AttentionCall call = device_call(p);
    const AttentionIndices indices(call);
    const std::string found = message_of([&] {
      AttentionFault first;
      for (std::int64_t item = indices.items(); item-- > 0;) {
        SearchedBlocks blocks;
        if (const AttentionFault fault = indices.fault(item, blocks); fault.found()) first = fault;
      }
      raise(first, call);
    });
    const std::string expected =
        message_of([&] { checked_inputs(Pass::forward, p.inputs(), p.options, Context{}); });
    ASSERT_EQ(found, expected);
    faults += found.empty() ? 0 : 1;
  }
  EXPECT_GT(faults, 50);
}

}  // namespace
}  // namespace tilewise::test::index_tensors_test
