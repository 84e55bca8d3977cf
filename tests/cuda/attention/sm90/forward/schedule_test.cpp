#include "cuda/attention/sm90/forward/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <set>
#include <utility>
#include <vector>

#include "cuda/attention/sm90/forward/packed.h"
#include "support/garbage.h"

namespace tilewise::test::schedule_test {
namespace {

using cuda::wgmma::BandOfKeys;
using cuda::wgmma::Schedule;
using cuda::wgmma::TileSpan;
using cuda::wgmma::WorkTile;

// These need no device.

TEST(WgmmaSchedule, HasEveryTileOnce) {
  for (const int multiprocessors : {1, 7, 132}) {
    for (const int heads : {1, 3, 16, 131, 512}) {
      for (const int tiles : {1, 2, 3, 11, 86}) {
        for (const int section : {0, 1, 4, 64}) {
          const bool last_first = (heads + tiles) % 2 == 0;
          const Schedule schedule = Schedule::of(multiprocessors, heads, tiles, section, last_first);
          EXPECT_EQ(schedule.blocks, std::min(multiprocessors, heads * tiles));
          std::set<std::pair<int, int>> seen;
          for (int index = 0; index < schedule.total(); ++index) {
            const WorkTile work = schedule.work_tile(index);
            EXPECT_TRUE(seen.insert({work.head, work.tile}).second);
            EXPECT_TRUE(work.head >= 0 && work.head < heads && work.tile >= 0 && work.tile < tiles);
          }
          EXPECT_EQ(seen.size(), static_cast<std::size_t>(heads) * static_cast<std::size_t>(tiles))
              << multiprocessors << " " << heads << " " << tiles << " " << section;
        }
      }
    }
  }
}

TEST(WgmmaSchedule, MixedTilesHaveEveryRowOnceAndAreAboutEqual) {
  for (const int consumers : {2, 3, 4}) {
    for (const int length : {1, 64, 65, 300, 512, 1000, 4096}) {
      const int rows = 64 * consumers;
      const Schedule schedule = Schedule::of_mixed(1, (length + rows - 1) / rows);
      std::set<int> seen;
      int least = length * consumers;
      int most = 0;
      for (int tile = 0; tile < schedule.tiles; ++tile) {
        int keys = 0;  // of rows that see all keys up to their own
        int longest = 0;
        for (int consumer = 0; consumer < consumers; ++consumer) {
          const int first = schedule.first_row(tile, consumer, consumers, length);
          if (first == length) continue;
          EXPECT_TRUE(first >= 0 && first < length && first % 64 == 0 && seen.insert(first).second);
          EXPECT_TRUE(consumer == 0 || first < longest) << "keys are loaded for the first consumer";
          longest = std::max(longest, first);
          keys += first + 64;
        }
        least = std::min(least, keys);
        most = std::max(most, keys);
      }
      EXPECT_EQ(static_cast<int>(seen.size()), (length + 63) / 64);
      EXPECT_LE(most - least, 64 * schedule.tiles) << consumers << " " << length;
    }
  }
}

TEST(WgmmaSchedule, SplitsCoverAllKeys) {
  for (const TileSpan span : {TileSpan{0, 0}, {0, 1}, {3, 10}, {5, 200}}) {
    for (const int splits : {1, 2, 7, 32}) {
      int end = span.first;
      for (int n = 0; n < splits; ++n) {
        const TileSpan split = span.split(n, splits);
        EXPECT_LE(split.count(), (span.count() + splits - 1) / splits);
        if (split.count() == 0) continue;
        EXPECT_EQ(split.first, end);
        end = split.last;
      }
      EXPECT_EQ(end, span.last);
    }
  }
  EXPECT_EQ((TileSpan{2, 5}.cut({4, 9}).count()), 1);
  EXPECT_EQ((TileSpan{2, 4}.cut({4, 9}).count()), 0);
}

// When the last block is done over the mean, with causal: a block that is done takes the next tile.
double imbalance(int length, int dim, int rows) {
  const int heads = 16384 / length * 2048 / dim;  // 16k tokens of hidden size 2048
  const int section = Schedule::section_of(heads, std::int64_t{length} * dim * 4, heads);
  const Schedule schedule = Schedule::of(132, heads, (length + rows - 1) / rows, section);
  std::priority_queue<double, std::vector<double>, std::greater<>> done;
  for (int block = 0; block < schedule.blocks; ++block) done.push(0);
  double all = 0;
  double last = 0;
  for (int index = 0; index < schedule.total(); ++index) {
    const int first = schedule.work_tile(index).tile * rows;
    double keys = 0;
    for (int row = first; row < std::min(first + rows, length); row += 64) keys += row + 64;
    const double end = done.top() + keys;
    done.pop();
    done.push(end);
    all += keys;
    last = std::max(last, end);
  }
  return last * schedule.blocks / all;
}

TEST(WgmmaSchedule, IsEvenWhereTilesAreNot) {
  for (int length = 512; length <= 16384; length *= 2) {
    EXPECT_LT(imbalance(length, 64, 192), 1.05) << length;
    EXPECT_LT(imbalance(length, 128, 192), 1.08) << length;
    EXPECT_LT(imbalance(length, 128, 128), 1.05) << length;
    EXPECT_LT(imbalance(length, 256, 128), 1.08) << length;
  }
}

TEST(WgmmaSchedule, HasSectionsOfNoMoreHeadsThanItIsTold) {
  constexpr std::int64_t few_bytes = 1 << 10;
  EXPECT_EQ(Schedule::section_of(16, few_bytes, 16), 16);
  EXPECT_EQ(Schedule::section_of(16, few_bytes, 8), 8);
  EXPECT_EQ(Schedule::section_of(12, few_bytes, 8), 6) << "sections are about equal";
  EXPECT_EQ(Schedule::section_of(3, few_bytes, 8), 3);
  EXPECT_EQ(Schedule::section_of(64, 8 << 20, 8), 2) << "that their keys fit the L2 may want fewer";
}

TEST(WgmmaBand, IsTheCalls) {
  for (const std::int64_t left : {std::int64_t{0}, std::int64_t{3}, std::int64_t{90}, Band::unbounded}) {
    for (const std::int64_t right : {std::int64_t{0}, std::int64_t{5}, Band::unbounded}) {
      for (const auto& [length_q, length_k] : {std::pair{40, 70}, {70, 40}, {1, 1}, {200, 3}}) {
        for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
          AttentionCall call;
          call.problem.length_q = length_q;
          call.problem.length_k = length_k;
          call.band = {.left = left, .right = right};
          call.alignment = alignment;
          const BandOfKeys band = BandOfKeys::of(call);
          const Sequence sequence = call.sequence(0);
          for (int i = 0; i < length_q; ++i) {
            const KeyRange expected = call.keys_of(sequence, i);
            if (expected.empty()) {
              EXPECT_GE(band.first(i), band.last(i));
              EXPECT_EQ(band.tiles(i, i + 1, 16).count(), 0);
              continue;
            }
            EXPECT_EQ(band.first(i), expected.first);
            EXPECT_EQ(band.last(i), expected.last);
            const TileSpan tiles = band.tiles(i, i + 1, 16);
            EXPECT_LE(tiles.first * 16, expected.first);
            EXPECT_GE(tiles.last * 16, expected.last);
            const TileSpan all = band.tiles(0, length_q, 16);
            EXPECT_LE(all.first, tiles.first);
            EXPECT_GE(all.last, tiles.last);
          }
        }
      }
    }
  }
}

// Whatever cumulative lengths hold: rows that tiles of packed sequences have are inside the tensors, and each
// row of queries is some tile's.
TEST(WgmmaSchedule, TilesOfPackedSequencesHaveEveryRow) {
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random rng(seed);
    const auto sequences = static_cast<int>(rng.between(0, 9));
    const auto total_q = static_cast<int>(rng.between(0, 700)),
               total_k = static_cast<int>(rng.between(0, 90));
    const auto size = static_cast<std::size_t>(sequences + 1);
    std::vector<std::int32_t> q(size), k(size);
    for (std::int32_t& number : q) number = static_cast<std::int32_t>(garbage_index(rng, total_q));
    for (std::int32_t& number : k) number = static_cast<std::int32_t>(garbage_index(rng, total_k));
    const bool valid = rng.chance(0.3);
    if (valid) {
      for (std::int32_t& number : q) number = static_cast<std::int32_t>(rng.between(0, total_q));
      std::sort(q.begin(), q.end());
      q[0] = 0;
    }
    cuda::wgmma::GeneralArguments general;
    general.cumulative_q = {q.data(), {1}};
    general.cumulative_k = {k.data(), {1}};
    general.batch = sequences;
    general.total_q = total_q;
    general.total_k = total_k;
    const auto longest_k = static_cast<int>(rng.between(0, 90));
    for (const int rows : {1, 16, 64, 128}) {
      std::vector<int> times(static_cast<std::size_t>(total_q));
      for (int number = 0; number < cuda::wgmma::packed_tiles(total_q, sequences, rows); ++number) {
        const auto tile = cuda::wgmma::PackedTile::of(general, number, rows, longest_k);
        ASSERT_TRUE(tile.b >= 0 && tile.b <= sequences);
        ASSERT_GE(tile.number, 0);
        ASSERT_TRUE(tile.row_q >= 0 && tile.length_q >= 0 && tile.row_q + tile.length_q <= total_q);
        ASSERT_TRUE(tile.row_k >= 0 && tile.length_k >= 0 && tile.row_k + tile.length_k <= total_k);
        ASSERT_LE(tile.length_k, longest_k);
        for (int r = tile.number * rows; r < std::min((tile.number + 1) * rows, tile.length_q); ++r) {
          ++times[static_cast<std::size_t>(tile.row_q + r)];
        }
      }
      for (const int count : times) {
        ASSERT_GE(count, 1);
        ASSERT_TRUE(!valid || count == 1);
      }
    }
  }
}

}  // namespace
}  // namespace tilewise::test::schedule_test
