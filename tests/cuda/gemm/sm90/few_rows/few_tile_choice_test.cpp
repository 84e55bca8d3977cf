#include "cuda/gemm/sm90/few_rows/few_tile_choice.h"

#include <gtest/gtest.h>

#include "cuda/gemm/common/order.h"

namespace tilewise::test::few_tile_choice_test {
namespace {

using namespace cuda::gemm;

// These need no device.

constexpr int h200 = 132;  // multiprocessors

GemmProblem problem(std::int64_t m, std::int64_t n, std::int64_t k, bool gated = false) {
  return {.dtype = DType::bf16, .out_dtype = DType::bf16, .m = m, .n = n, .k = k, .gated = gated};
}

template <typename Table>
int tokens_of(const GemmProblem& p) {
  const int row = suited_row<Table>(p, h200);
  return row < 0 ? 0 : Table::rows[row].tokens;
}

TEST(GemmOrder, TilesMayBeNone) {
  EXPECT_EQ(TileOrder::of(1, 0, 264, 128, 128).tiles_n, 0);
  EXPECT_EQ(TileOrder::of(0, 3, 264, 128, 128).tiles_m, 0);
}

TEST(FewTileChoice, SplitsHaveEveryUnitOnceAndAreAboutEqual) {
  for (const int splits : {1, 2, 3, 4}) {
    for (const int units : {1, 2, 3, 64, 172, 173}) {
      const FewTiles tiles{.rows = 64, .tiles = 10, .splits = splits, .units = units};
      int next = 0;
      for (int split = 0; split < splits; ++split) {
        EXPECT_EQ(tiles.begin(split), next);
        EXPECT_TRUE(tiles.count(split) == units / splits || tiles.count(split) == units / splits + 1);
        next += tiles.count(split);
      }
      EXPECT_EQ(next, units);
    }
  }
}

TEST(FewTileChoice, TilesHaveEveryRowOfWeights) {
  for (const int multiprocessors : {1, 2, 78, 114, h200}) {
    for (const FewTileConfig& c : FewTile::rows) {
      for (const std::int64_t n : {1, 31, 4096, 5120, 11008, 32000}) {
        const FewTiles tiles = tiles_of(problem(c.tokens, n, 4096), c, multiprocessors);
        EXPECT_TRUE(tiles.rows > 0 && tiles.rows <= c.rows && tiles.rows % 4 == 0);
        EXPECT_GE(std::int64_t{tiles.rows} * tiles.tiles, n);
        EXPECT_LT(std::int64_t{tiles.rows} * (tiles.tiles - 1), n);
        EXPECT_GE(tiles.units * c.depth(), 4096);
      }
    }
  }
}

TEST(FewTileChoice, WhatRunsByTilesIsNoMoreThanABlockAMultiprocessor) {
  for (std::int64_t n = 8; n < 20000; n += 8) {
    for (const FewTileConfig& c : FewTile::rows) {
      const GemmProblem p = problem(c.tokens, n, 4096);
      if (!suits_tiles(p, c, h200)) continue;
      EXPECT_LE(tiles_of(p, c, h200).blocks(), h200);
    }
  }
}

TEST(FewTileChoice, ProductsOfLlama7bRunByTilesForAsManyTokens) {
  for (int m = 2; m <= 64; ++m) {
    const int tokens = m <= 16 ? 16 : m <= 32 ? 32 : 64;
    EXPECT_EQ(tokens_of<FewTileGated>(problem(m, 11008, 4096, true)), tokens) << m;
    EXPECT_EQ(tokens_of<FewTile>(problem(m, 11008, 4096)), tokens) << m;
    EXPECT_EQ(tokens_of<FewTile>(problem(m, 4096, 11008)), tokens) << m;
  }
  for (const std::int64_t m : {0, 1, 65}) EXPECT_FALSE(runs_by_tiles(problem(m, 11008, 4096), h200));
}

TEST(FewTileChoice, WhatIsUnlikeWhatWasMeasuredIsSharedOutEvenly) {
  for (const std::int64_t m : {2, 16, 32, 64}) {
    for (const std::int64_t n : {64, 1024, 3072, 6144, 12288, 14336, 32000}) {
      EXPECT_FALSE(runs_by_tiles(problem(m, n, 4096), h200)) << m << " " << n;
      EXPECT_FALSE(runs_by_tiles(problem(m, n, 4096, true), h200)) << m << " " << n;
    }
  }
  EXPECT_FALSE(runs_by_tiles(problem(16, 0, 4096), h200));
  // A copy of two panels takes whole ones alone.
  EXPECT_FALSE(runs_by_tiles(problem(16, 4096, 11016), h200));
  EXPECT_TRUE(runs_by_tiles(problem(64, 4096, 11016), h200));
  EXPECT_TRUE(runs_by_tiles(problem(16, 11008, 4104), h200));
}

}  // namespace
}  // namespace tilewise::test::few_tile_choice_test
