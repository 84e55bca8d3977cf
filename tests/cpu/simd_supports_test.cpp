#include <gtest/gtest.h>

#include "gemm/kernel.h"
#include "norm/kernel.h"
#include "rope/kernel.h"

// The vector kernels count a row's elements in 32 bits. Longer rows are the reference's.
namespace tilewise::test::simd_supports_test {
namespace {

constexpr std::int64_t two31 = std::int64_t{1} << 31;

template <typename K, typename Problem>
void expect_taken_by(std::span<const K> kernels, const Problem& problem, std::string_view name) {
  EXPECT_EQ(choose_kernel(kernels, problem, "auto").name, name) << to_string(problem);
}

TEST(SimdSupports, rows_of_fewer_than_2_31_elements) {
  for (const auto& [length, name] : {std::pair(two31 - 1, "simd"), std::pair(two31, "reference")}) {
    expect_taken_by(gemm_kernel_list(), GemmProblem{.m = 1, .n = 1, .k = length}, name);
    expect_taken_by(norm_kernel_list(), NormProblem{.rows = 1, .dim = length}, name);
    expect_taken_by(rope_kernel_list(), RopeProblem{.batch = 1, .heads_q = 1, .length = 1, .dim = length},
                    name);
  }
}

}  // namespace
}  // namespace tilewise::test::simd_supports_test
