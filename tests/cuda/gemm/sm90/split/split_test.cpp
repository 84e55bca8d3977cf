#include <cmath>

#include "cuda/layer/device_call.h"
#include "layer/gemm_case.h"

namespace tilewise::test::split_test {
namespace {

using namespace gemm_case;

// f32 in parts on tensor cores: what its exactness hangs on. Every result is judged by the sum of its
// products' magnitudes, of which f32 itself loses a few units of rounding.

class CudaSplitGemm : public CudaLayerTest {
 protected:
  void SetUp() override {
    CudaLayerTest::SetUp();
    Random random(1);
    const Problem p = plain_problem(random, {128, 128, 64});
    GemmInputs in = p.inputs();
    GemmOutputs out{p.out.view()};
    for (Tensor* tensor : {&in.a, &in.b, &out.out}) tensor->device = first_device;
    for (const auto& entry : explain_gemm(in, p.options, out, cuda_context()).entries) {
      if (entry.kernel == "split" && entry.verdict == Explanation::Verdict::unable) {
        GTEST_SKIP() << "no Hopper GPU";
      }
    }
  }

  static Problem plain_problem(Random& random, Sizes n, bool by_columns = false) {
    Problem p;
    const Placement placement = by_columns ? Placement{.order = {1, 0}} : Placement{};
    p.a = random_buffer(random, DType::f32, {n.m, n.k}, 1, placement);
    p.b = random_buffer(random, DType::f32, {n.n, n.k}, 1, placement);
    p.out = Buffer(DType::f32, {n.m, n.n});
    p.options.kernel = "split";
    return p;
  }

  template <typename Change>
  static void change(Buffer& buffer, const Change& changed) {
    std::vector<double> values = buffer.values();
    const auto columns = static_cast<std::size_t>(buffer.extent(1));
    for (std::size_t n = 0; n < values.size(); ++n) {
      values[n] = changed(values[n], n / columns, n % columns);
    }
    buffer.set_values(values);
  }

  /// Runs it; the largest error, in units of the sum of magnitudes.
  static double largest_error(Problem& p) {
    p.out.poison();
    run(p.inputs(), p.options, p.out, cuda_context());
    return largest_error(p, p.out.values());
  }

  /// The same of results that are given.
  static double largest_error(const Problem& p, const std::vector<double>& out) {
    const std::vector<double> a = p.a.values(), b = p.b.values();
    const auto k = static_cast<std::size_t>(p.a.extent(1)), n = static_cast<std::size_t>(p.b.extent(0));
    double largest = 0;
    for (std::size_t at = 0; at < out.size(); ++at) {
      double truth = 0, size = 0;
      for (std::size_t s = 0; s < k; ++s) {
        const double product = a[at / n * k + s] * b[at % n * k + s];
        truth += product;
        size += std::abs(product);
      }
      const double error = std::abs(out[at] - truth);
      if (!(error <= 1e-2 * size)) return INFINITY;
      if (size > 0) largest = std::max(largest, error / size);
    }
    return largest;
  }
};

constexpr Sizes usual{150, 200, 264};
constexpr double unit = 0x1p-24;

TEST_F(CudaSplitGemm, OfUsualNumbersLosesNoMoreThanF32) {
  for (const Sizes n : {usual, Sizes{128, 128, 64}, {130, 132, 2056}}) {
    for (const bool by_columns : {false, true}) {
      SeededRandom random(static_cast<std::uint64_t>(2000 + n.k));
      Problem p = plain_problem(random, by_columns ? Sizes{n.m / 4 * 4, n.n, n.k} : n, by_columns);
      EXPECT_LE(largest_error(p), 4 * unit);
    }
  }
}

TEST_F(CudaSplitGemm, OfSumsOfOneSignLosesNoMoreThanF32) {
  SeededRandom random(2100);
  Problem p = plain_problem(random, {128, 128, 4096});
  for (Buffer* buffer : {&p.a, &p.b}) {
    change(*buffer, [](double x, std::size_t, std::size_t) { return std::abs(x); });
  }
  EXPECT_LE(largest_error(p), 16 * unit);  // one after another, f32 loses some 20 and up to 60
}

TEST_F(CudaSplitGemm, RowsMayHaveAnySize) {
  for (const bool by_columns : {false, true}) {
    SeededRandom random(2200);
    Problem p = plain_problem(random, {152, 200, 264}, by_columns);
    const auto of_row = [](double x, std::size_t row, std::size_t) {
      return std::ldexp(x, static_cast<int>(row * 7 % 61) - 30);
    };
    change(p.a, of_row);
    change(p.b, of_row);
    EXPECT_LE(largest_error(p), 4 * unit);
    change(p.a, [](double x, std::size_t, std::size_t) { return std::ldexp(x, 80); });
    change(p.b, [](double x, std::size_t, std::size_t) { return std::ldexp(x, -90); });
    EXPECT_LE(largest_error(p), 4 * unit);
  }
}

// Large numbers of either factor meet small ones of the other alone: parts of f16 would lose these.
TEST_F(CudaSplitGemm, LargeNumbersMayMeetSmallOnesAlone) {
  for (const bool by_columns : {false, true}) {
    for (const double small : {1e-4, 1e-6, 1e-8, 1e-12}) {
      SeededRandom random(2300);
      Problem p = plain_problem(random, {152, 200, 264}, by_columns);
      change(p.a, [&](double x, std::size_t, std::size_t s) { return s % 2 == 0 ? x : x * small; });
      change(p.b, [&](double x, std::size_t, std::size_t s) { return s % 2 == 1 ? x : x * small; });
      EXPECT_LE(largest_error(p), 4 * unit) << small;
    }
  }
}

// One row alone is enough. Its first number dwarfs the others, whose products are each less than the last
// digit of its own and many: f32 loses them one by one, too.
TEST_F(CudaSplitGemm, OneRowMayBeUnlikeTheOthers) {
  for (const std::uint64_t seed : {2400, 2401, 2402}) {
    SeededRandom random(seed);
    Problem p = plain_problem(random, usual);
    change(p.a, [&](double x, std::size_t row, std::size_t s) { return row == 77 && s > 0 ? x * 1e-9 : x; });
    change(p.b, [&](double x, std::size_t row, std::size_t s) { return row == 99 && s == 0 ? x * 1e-9 : x; });
    const double plain = largest_error(p, plain_of(p).values);
    EXPECT_LE(largest_error(p), std::max(4 * unit, plain)) << "plain f32 " << plain / unit << " units";
  }
}

TEST_F(CudaSplitGemm, FewNumbersOtherThanZeroAreEnough) {
  SeededRandom random(2500);
  Problem p = plain_problem(random, usual);
  change(p.b, [&](double x, std::size_t row, std::size_t s) { return s == row ? x : 0.0; });
  EXPECT_LE(largest_error(p), 4 * unit);
  change(p.a, [&](double, std::size_t, std::size_t) { return 0.0; });
  EXPECT_EQ(largest_error(p), 0);
}

TEST_F(CudaSplitGemm, InfinitiesAndNaNStayWhereTheyBelong) {
  for (const bool by_columns : {false, true}) {
    SeededRandom random(2600);
    Problem p = plain_problem(random, {280, 300, 264}, by_columns);
    p.a.set({3, 5}, INFINITY);
    p.a.set({200, 8}, -INFINITY);
    p.b.set({17, 100}, NAN);
    p.b.set({290, 9}, 3.4e38);  // finite, but not so as bf16
    for (const bool accumulate : {false, true}) {
      p.options.accumulate = accumulate;
      const std::vector<double> ones(static_cast<std::size_t>(p.out.size()), 1.0);
      p.out.set_values(ones);
      p.options.kernel = "simt";
      run(p.inputs(), p.options, p.out, cuda_context());
      const std::vector<double> expected = p.out.values();
      p.out.set_values(ones);
      p.options.kernel = "split";
      run(p.inputs(), p.options, p.out, cuda_context());
      const std::vector<double> got = p.out.values();
      int unlike = 0;
      for (std::size_t n = 0; n < got.size(); ++n) {
        const bool same = std::isfinite(expected[n])
                              ? std::abs(got[n] - expected[n]) <= 1e-4 * std::max(1.0, std::abs(expected[n]))
                          : std::isnan(expected[n]) ? std::isnan(got[n])
                                                    : got[n] == expected[n];
        unlike += same ? 0 : 1;
      }
      EXPECT_EQ(unlike, 0);
    }
  }
}

TEST_F(CudaSplitGemm, WhereTf32IsAllowedHasAtLeastItsDigits) {
  for (const double small : {1.0, 1e-3, 1e-14}) {
    SeededRandom random(2700);
    Problem p = plain_problem(random, usual);
    p.options.precision = Precision::allow_tf32;
    change(p.a, [&](double x, std::size_t, std::size_t s) { return s % 2 == 0 ? x : x * small; });
    change(p.b, [&](double x, std::size_t, std::size_t s) { return s % 2 == 1 ? x : x * small; });
    const double error = largest_error(p);
    EXPECT_LE(error, 0x1p-12) << small;
    if (small == 1.0) {
      EXPECT_GE(error, 0x1p-18);  // one product of parts does
    }
  }
}

}  // namespace
}  // namespace tilewise::test::split_test
