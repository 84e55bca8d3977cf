#include "cuda/gemm/sm90/few_rows/few_tile_choice.h"
#include "cuda/layer/device_call.h"
#include "cuda/runtime/device.h"
#include "layer/gemm_case.h"

namespace tilewise::test::gemm_test {
namespace {

using namespace gemm_case;

class CudaGemm : public CudaLayerTest {
 protected:
  static Explanation explain(const Problem& p) {
    GemmInputs in = p.inputs();
    GemmOutputs out{p.out.view()};
    for (Tensor* tensor : {&in.a, &in.b, &in.bias, &in.gate, &in.gate_bias, &in.residual, &out.out}) {
      tensor->device = first_device;
    }
    return explain_gemm(in, p.options, out, cuda_context());
  }
  static bool takes(const Problem& p, std::string_view kernel) {
    for (const auto& entry : explain(p).entries) {
      if (entry.kernel == kernel) return entry.verdict != Explanation::Verdict::unable;
    }
    return false;
  }
  static std::string chosen(const Problem& p) {
    for (const auto& entry : explain(p).entries) {
      if (entry.verdict == Explanation::Verdict::chosen) return std::string(entry.kernel);
    }
    return {};
  }

  /// A matrix that lies as the kernels for Hopper want it, packed or not.
  static Buffer aligned_matrix(Random& random, DType dtype, std::int64_t rows, std::int64_t columns,
                               double deviation, bool by_columns = false) {
    const std::int64_t row = by_columns ? rows : columns;
    const std::int64_t padding = (8 - row % 8) % 8 + 8 * random.between(0, 1);
    Placement placement;
    if (by_columns) placement.order = {1, 0};
    placement.padding = by_columns ? Shape{padding} : Shape{0, padding};
    return random_buffer(random, dtype, {rows, columns}, deviation, placement);
  }

  /// A problem of such.
  static Problem aligned_problem(Random& random, Sizes n, DType dtype, bool a_by_columns = false,
                                 bool b_by_columns = false) {
    Problem p;
    const auto matrix = [&](DType type, std::int64_t rows, std::int64_t columns, double deviation,
                            bool by_columns) {
      return aligned_matrix(random, type, rows, columns, deviation, by_columns);
    };
    const double deviation = 1 / std::sqrt(static_cast<double>(n.k));
    p.a = matrix(dtype, n.m, n.k, 1, a_by_columns);
    p.b = matrix(dtype, n.n, n.k, deviation, b_by_columns);
    if (random.chance(0.5)) p.bias = random_buffer(random, random.chance(0.5) ? DType::f32 : dtype, {n.n});
    const bool gated = !a_by_columns && !b_by_columns && random.chance(0.4);
    p.options.activation =
        random.pick({Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu});
    if (!gated && random.chance(0.3)) p.options.activation = Activation::none;
    if (gated) {
      p.gate = matrix(dtype, n.n, n.k, deviation, b_by_columns);
      if (random.chance(0.5)) p.gate_bias = random_buffer(random, dtype, {n.n});
    }
    const DType out = random.chance(0.25) ? DType::f32 : dtype;
    p.out = matrix(out, n.m, n.n, 1, false);
    p.options.accumulate = random.chance(0.25);
    if (!p.options.accumulate) {
      if (random.chance(0.4)) p.residual = matrix(out, n.m, n.n, 1, false);
      p.out.poison();
    }
    return p;
  }

  /// One for few rows. The epilogue's number says which of bias, the gate's bias, and residual or sum in out
  /// there are.
  static Problem few_problem(Random& random, Sizes n, DType dtype, Activation activation, bool gated,
                             int epilogue) {
    Problem p;
    const double deviation = 1 / std::sqrt(static_cast<double>(n.k));
    p.a = aligned_matrix(random, dtype, n.m, n.k, 1);
    p.b = aligned_matrix(random, dtype, n.n, n.k, deviation);
    if (epilogue % 2 == 1) p.bias = random_buffer(random, dtype, {n.n});
    if (gated) p.gate = aligned_matrix(random, dtype, n.n, n.k, deviation);
    if (gated && epilogue / 2 % 2 == 1) p.gate_bias = random_buffer(random, DType::f32, {n.n});
    p.options.activation = activation;
    p.options.accumulate = epilogue / 4 == 2;
    p.out = aligned_matrix(random, dtype, n.m, n.n, 1);
    if (epilogue / 4 == 1) p.residual = aligned_matrix(random, dtype, n.m, n.n, 1);
    if (!p.options.accumulate) p.out.poison();
    return p;
  }
  static constexpr int few_epilogues = 12;

  static bool runs_by_tiles(const Problem& p) {
    const GemmProblem problem{
        .m = p.a.extent(0), .n = p.b.extent(0), .k = p.a.extent(1), .gated = p.gate.given()};
    return cuda::gemm::runs_by_tiles(problem, multiprocessors());
  }
  static int multiprocessors() { return cuda::device_properties(first_device.index).multiprocessors; }

  /// One that a BLAS could take.
  static Problem plain_problem(std::uint64_t seed, Sizes n) {
    Random random(seed);
    const DType dtype = seed % 2 == 0 ? DType::f16 : DType::bf16;
    Problem p = aligned_problem(random, n, dtype, random.chance(0.5), random.chance(0.5));
    p.options.activation = Activation::none;
    p.gate = p.gate_bias = {};
    if (p.bias.dtype() != dtype) p.bias = {};
    if (p.out.dtype() != dtype) {
      p.options.accumulate = false;
      p.residual = {};
      p.out = random_buffer(random, dtype, {n.m, n.n});
    }
    return p;
  }

  static void check_by(std::string_view kernel, Problem& p) {
    SCOPED_TRACE(kernel);
    ASSERT_TRUE(takes(p, kernel));
    p.options.kernel = kernel;
    check(p, cuda_context());
  }

  /// Whether this device has the kernels for Hopper.
  static bool has_hopper_kernels() {
    Random random(1);
    const Problem p = aligned_problem(random, {8, 8, 8}, DType::bf16);
    return takes(p, "wgmma");
  }
};

constexpr Activation activations[] = {Activation::none, Activation::relu, Activation::gelu,
                                      Activation::gelu_tanh, Activation::silu};

TEST_F(CudaGemm, EveryEpilogueIsNearTheTruthForEveryTypeAndLayout) {
  std::uint64_t seed = 1000;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Activation activation : activations) {
      for (const bool gated : {false, true}) {
        if (gated && activation == Activation::none) continue;
        for (int repeat = 0; repeat < 4; ++repeat) {
          SeededRandom random(++seed);
          const Sizes n{random.between(1, 150), random.between(1, 200), random.between(1, 260)};
          Problem p = random_problem(random, n, dtype, activation, gated);
          check(p, cuda_context());
        }
      }
    }
  }
}

TEST_F(CudaGemm, WgmmaIsNearTheTruthAroundItsTiles) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  std::uint64_t seed = 1200;
  for (const Sizes n : {Sizes{1, 8, 8},
                        {127, 64, 64},
                        {128, 128, 72},
                        {129, 256, 136},
                        {255, 264, 200},
                        {256, 40, 1000},
                        {300, 520, 129},
                        {640, 136, 65},
                        {65, 1104, 24}}) {
    for (const auto& [a, b] : {std::pair{false, false}, {false, true}, {true, false}, {true, true}}) {
      SeededRandom random(++seed);
      Problem p = aligned_problem(random, n, seed % 2 == 0 ? DType::f16 : DType::bf16, a, b);
      check_by("wgmma", p);
    }
  }
}

TEST_F(CudaGemm, WgmmaTakesResultsInPiecesOf16Bytes) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  for (int seed = 1300; seed < 1310; ++seed) {
    SeededRandom random(static_cast<std::uint64_t>(seed));
    const Problem p = aligned_problem(random, {100, 129, 64}, DType::bf16);
    EXPECT_EQ(takes(p, "wgmma"), p.out.dtype() == DType::f32);
  }
}

TEST_F(CudaGemm, FewRowsAreNearTheTruth) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  std::uint64_t seed = 1400;
  for (const std::int64_t m : {1, 2, 7, 8, 9, 15, 17, 31, 33, 63, 64}) {
    for (const auto& [n, k] :
         {std::pair{8, 8}, {129, 1000}, {700, 72}, {64, 5000}, {1030, 264}, {72, 4096}}) {
      for (const DType dtype : {DType::f16, DType::bf16}) {
        SeededRandom random(++seed);
        Problem p = aligned_problem(random, {m, n, k}, dtype);
        // The only row of a result of odd length does not count as aligned.
        if (p.out.dtype() == dtype && (m > 1 || n % 8 == 0)) check_by("few_rows", p);
      }
    }
  }
}

constexpr std::int64_t few_counts[] = {1, 2, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64};

TEST_F(CudaGemm, FewRowsByTilesAreNearTheTruth) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  const std::int64_t at_a_time = multiprocessors();
  struct Case {
    std::int64_t n, k;
    bool gated;
  };
  std::uint64_t seed = 2000;
  for (const std::int64_t m : {1, 2, 15, 16, 17, 32, 33, 64}) {
    // The last tile has an odd number of columns, or one. Long sums are shared by warpgroups, and of many
    // rows by two blocks. There is an odd number of cases: they have either type by turns.
    for (const Case& c : {Case{84 * at_a_time - 83, 72, false},
                          {88 * at_a_time - 5, 136, false},
                          {83 * at_a_time - 1, 8, false},
                          {84 * at_a_time - 83, 136, true},
                          {88 * at_a_time - 5, 72, true},
                          {32 * at_a_time - 127, 64, false},
                          {32 * at_a_time - 5, 320, false}}) {
      SeededRandom random(++seed);
      const Sizes n{m, m == 1 ? c.n / 8 * 8 : c.n, c.k};  // the only row of an odd length is not aligned
      const auto epilogue = static_cast<int>(random.between(0, few_epilogues - 1));
      Problem p = few_problem(random, n, seed % 2 == 0 ? DType::f16 : DType::bf16,
                              random.pick({Activation::gelu, Activation::silu}), c.gated, epilogue);
      EXPECT_EQ(runs_by_tiles(p), m > 1);
      check_by("few_rows", p);
    }
  }
}

TEST_F(CudaGemm, FewRowsByTilesHaveEveryEpilogue) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  const std::int64_t at_a_time = multiprocessors();
  constexpr std::int64_t counts[] = {9, 24, 50};
  std::uint64_t seed = 2200;
  for (const Activation activation : activations) {
    for (const bool gated : {false, true}) {
      if (gated && activation == Activation::none) continue;
      for (int epilogue = 0; epilogue < few_epilogues; ++epilogue) {
        SeededRandom random(++seed);
        const DType dtype = seed % 2 == 0 ? DType::f16 : DType::bf16;
        const std::int64_t n = gated || epilogue % 4 < 2 ? 80 * at_a_time + 3 : 32 * at_a_time - 30;
        Problem p = few_problem(random, {counts[seed % 3], n, 64}, dtype, activation, gated, epilogue);
        EXPECT_TRUE(runs_by_tiles(p));
        check_by("few_rows", p);
      }
    }
  }
}

TEST_F(CudaGemm, FewRowsByTilesGoRoundTheirPlaces) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  const std::int64_t at_a_time = multiprocessors();
  std::uint64_t seed = 2600;
  for (const std::int64_t m : {2, 33}) {
    // More than three rounds: places hold 512 summands at the most, or 1024, or those of two blocks.
    for (const bool gated : {false, true}) {
      SeededRandom random(++seed);
      Problem p = few_problem(random, {m, 80 * at_a_time + 1, 1608}, DType::bf16, Activation::silu, gated, 0);
      EXPECT_TRUE(runs_by_tiles(p));
      check_by("few_rows", p);
    }
    SeededRandom random(++seed);
    Problem p = few_problem(random, {m, 32 * at_a_time - 140, 3264}, DType::f16, Activation::none, false, 4);
    EXPECT_TRUE(runs_by_tiles(p));
    check_by("few_rows", p);
  }
}

TEST_F(CudaGemm, FewRowsByEqualSharesAreNearTheTruth) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  std::uint64_t seed = 2700;
  int epilogue = 0;
  for (const std::int64_t m : few_counts) {
    for (const auto& [n, k] : {std::pair{1031, 264}, {517, 1000}, {4096, 72}}) {
      for (const bool gated : {false, true}) {
        if (m == 1 && n % 8 != 0) continue;
        SeededRandom random(++seed);
        Problem p = few_problem(random, {m, n, k}, seed % 2 == 0 ? DType::f16 : DType::bf16, Activation::gelu,
                                gated, ++epilogue % few_epilogues);
        check_by("few_rows", p);
      }
    }
  }
}

TEST_F(CudaGemm, FewRowsAre64AtMost) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  SeededRandom random(2800);
  Problem p = few_problem(random, {65, 80 * multiprocessors(), 72}, DType::bf16, Activation::silu, true, 1);
  EXPECT_FALSE(takes(p, "few_rows"));
  check(p, cuda_context());
}

TEST_F(CudaGemm, OneRowIsNearTheTruthWithFewSummandsAndMany) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  std::uint64_t seed = 1480;
  for (const auto& [n, k] :
       {std::pair{17000, 64}, {1000, 4096}, {264, 4104}, {40, 9000}, {136, 12288}, {24, 13000}}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      SeededRandom random(++seed);
      Problem p = aligned_problem(random, {1, n, k}, seed % 2 == 0 ? DType::f16 : DType::bf16);
      if (p.out.dtype() == p.a.dtype()) check_by("few_rows", p);
    }
  }
}

TEST_F(CudaGemm, RowsMoreThanOneLeaveLargeWeightsToCublasLtUnlessThereIsMoreToDo) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  if (!takes(plain_problem(1, {8, 8, 8}), "cublaslt")) GTEST_SKIP() << "no cuBLASLt";
  for (const std::int64_t m : {1, 16, 64}) {
    SCOPED_TRACE(m);
    Problem p;
    p.a = Buffer(DType::bf16, {m, 4096});
    p.b = Buffer(DType::bf16, {11008, 4096});
    p.out = Buffer(DType::bf16, {m, 11008});
    EXPECT_EQ(chosen(p), m == 1 ? "few_rows" : "cublaslt");
    p.options.activation = Activation::silu;
    EXPECT_EQ(chosen(p), "few_rows");
    p.gate = p.b;
    EXPECT_EQ(chosen(p), "few_rows");
    p.gate = {};
    p.options.activation = Activation::none;
    p.b = Buffer(DType::bf16, {1024, 4096});
    p.out = Buffer(DType::bf16, {m, 1024});
    EXPECT_EQ(chosen(p), "few_rows");
  }
}

TEST_F(CudaGemm, CublasLtIsNearTheTruthWhereItIsThere) {
  if (!takes(plain_problem(1, {8, 8, 8}), "cublaslt")) GTEST_SKIP() << "no cuBLASLt, or no GPU for it";
  std::uint64_t seed = 1800;
  for (const Sizes n : {Sizes{1, 8, 8}, {130, 257, 33}, {64, 72, 1000}, {300, 520, 136}, {7, 1104, 24}}) {
    for (int repeat = 0; repeat < 6; ++repeat) {
      SCOPED_TRACE(++seed);
      Problem p = plain_problem(seed, n);
      check_by("cublaslt", p);
      Random random(seed);
      p = random_problem(random, n, DType::bf16, Activation::none, false);  // of any alignment
      if (takes(p, "cublaslt")) check_by("cublaslt", p);
    }
  }
}

TEST_F(CudaGemm, CublasLtActivatesInAPassOfItsOwn) {
  if (!takes(plain_problem(1, {8, 8, 8}), "cublaslt")) GTEST_SKIP() << "no cuBLASLt, or no GPU for it";
  std::uint64_t seed = 1950;
  for (const Activation activation : activations) {
    for (const Sizes n : {Sizes{130, 257, 33}, {64, 72, 1000}}) {
      SCOPED_TRACE(++seed);
      Problem p = plain_problem(seed, n);
      p.options.activation = activation;
      p.options.accumulate = false;
      p.residual = {};
      check_by("cublaslt", p);
    }
  }
}

TEST_F(CudaGemm, CublasLtTakesNoGateAndNoWiderBias) {
  Problem p = plain_problem(1900, {64, 64, 64});
  p.gate = p.b;
  p.options.activation = Activation::silu;
  EXPECT_FALSE(takes(p, "cublaslt"));
  p = plain_problem(1901, {64, 64, 64});
  Random random(1902);
  p.bias = random_buffer(random, DType::f32, {64});
  EXPECT_FALSE(takes(p, "cublaslt"));
}

TEST_F(CudaGemm, SplitFactorsKeepTheErrorOfF32) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "no Hopper GPU";
  std::uint64_t seed = 1500;
  for (const Sizes n : {Sizes{128, 128, 64}, {200, 132, 1000}, {131, 300, 201}}) {
    for (const auto& [a, b] : {std::pair{false, false}, {false, true}, {true, false}, {true, true}}) {
      SeededRandom random(++seed);
      Problem p = aligned_problem(random, n, DType::f32, a, b);
      check_by("split", p);
    }
  }
}

TEST_F(CudaGemm, MmaIsNearTheTruthForAnyStrides) {
  std::uint64_t seed = 1700;
  for (const Sizes n : {Sizes{1, 1, 1}, {130, 257, 33}, {64, 70, 1000}, {3, 400, 17}, {260, 129, 100}}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      for (const bool gated : {false, true}) {
        for (int repeat = 0; repeat < 4; ++repeat) {
          SeededRandom random(++seed);
          Problem p = random_problem(random, n, dtype, Activation::gelu, gated);
          if (takes(p, "mma")) check_by("mma", p);
        }
      }
    }
  }
}

TEST_F(CudaGemm, SimtIsNearTheTruth) {
  std::uint64_t seed = 1600;
  for (const Sizes n : {Sizes{1, 1, 1}, {130, 257, 33}, {64, 70, 1000}, {3, 400, 17}, {260, 129, 100}}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const bool gated : {false, true}) {
        SeededRandom random(++seed);
        Problem p = random_problem(random, n, dtype, Activation::silu, gated);
        check_by("simt", p);
      }
    }
  }
}

TEST_F(CudaGemm, NoRowsNoColumnsAndNothingToSumAreValid) {
  for (const Sizes n : {Sizes{0, 5, 7}, {5, 0, 7}, {5, 6, 0}, {50, 6, 0}, {0, 0, 0}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SeededRandom random(7);
      Problem p = random_problem(random, n, dtype, Activation::gelu, true);
      check(p, cuda_context());
    }
  }
}

TEST_F(CudaGemm, ResidualMayBeOutItself) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t m : {3, 60, 200}) {
      SeededRandom random(3);
      Problem p = aligned_problem(random, {m, 96, 64}, dtype);
      p.options.accumulate = false;
      p.residual = random_buffer(random, p.out.dtype(), {m, 96});
      const std::vector<double> truth = truth_of(p);
      const Plain plain = plain_of(p);
      run(p.inputs(), p.options, p.residual, cuda_context());
      expect_near(p.residual, truth, plain, "out", 4);
    }
  }
}

TEST_F(CudaGemm, TheSameBitsComeAgain) {
  const std::int64_t tiles = 32 * multiprocessors() - 128;  // few rows are shared by two blocks a tile
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Sizes n : {Sizes{1, 1500, 1000}, {40, 1500, 1000}, {300, 1500, 1000}, {40, tiles, 1000}}) {
      SeededRandom random(11);
      Problem p = aligned_problem(random, n, dtype);
      p.options.accumulate = false;
      run(p.inputs(), p.options, p.out, cuda_context());
      const std::vector<std::byte> first = p.out.bytes();
      for (int again = 0; again < 3; ++again) {
        p.out.poison();
        run(p.inputs(), p.options, p.out, cuda_context());
        EXPECT_EQ(first, p.out.bytes());
      }
    }
  }
}

}  // namespace
}  // namespace tilewise::test::gemm_test
