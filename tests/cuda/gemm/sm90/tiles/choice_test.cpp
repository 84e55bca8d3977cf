#include <gtest/gtest.h>

#include "cuda/gemm/sm90/tiles/choice.h"

// Which tiles wgmma's products are cut into: a model, and what was measured on an H200.

namespace tilewise::test::gemm_choice_test {
namespace {

using namespace cuda::gemm;
using Table = cuda::gemm::Plain;

TEST(GemmChoice, TilesAreThoseThatWereFastestOn132Multiprocessors) {
  struct Case {
    std::int64_t m, n, k;
    int rows, columns;
    bool pair;
  };
  for (const Case& c : {Case{2048, 2048, 2048, 128, 128, false},  Case{3072, 3072, 3072, 128, 192, false},
                        Case{4096, 4096, 2048, 128, 256, true},   Case{4096, 4096, 4096, 128, 256, true},
                        Case{6144, 6144, 6144, 128, 256, true},   Case{8192, 8192, 8192, 256, 168, false},
                        Case{512, 4096, 4096, 128, 128, false},   Case{512, 4096, 11008, 128, 128, false},
                        Case{512, 11008, 4096, 128, 168, false},  Case{512, 12288, 4096, 128, 192, false},
                        Case{1024, 4096, 4096, 128, 128, false},  Case{1024, 4096, 11008, 128, 256, true},
                        Case{1024, 11008, 4096, 128, 168, false}, Case{1024, 12288, 4096, 128, 256, true},
                        Case{2048, 4096, 11008, 128, 256, true},  Case{2048, 8192, 8192, 256, 168, false},
                        Case{2048, 11008, 4096, 256, 168, false}, Case{2048, 12288, 4096, 128, 256, true},
                        Case{2048, 13824, 5120, 128, 192, false}, Case{4096, 4096, 11008, 128, 256, true},
                        Case{4096, 11008, 4096, 256, 168, false}, Case{4096, 12288, 4096, 128, 256, true}}) {
    GemmProblem problem;
    problem.m = c.m;
    problem.n = c.n;
    problem.k = c.k;
    const GemmConfig& tile = Table::rows[choose_row<Table>(problem, 132)];
    EXPECT_TRUE(tile.rows() == c.rows && tile.columns == c.columns && (tile.pair != Pair::none) == c.pair)
        << c.m << " x " << c.n << " x " << c.k << ": " << tile.rows() << " x " << tile.columns;
  }
}

}  // namespace
}  // namespace tilewise::test::gemm_choice_test
