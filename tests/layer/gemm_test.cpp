#include "gemm/validate.h"
#include "layer/gemm_case.h"

namespace tilewise::test::gemm_test {
namespace {

using namespace gemm_case;

constexpr Activation activations[] = {Activation::none, Activation::relu, Activation::gelu,
                                      Activation::gelu_tanh, Activation::silu};

TEST(Gemm, every_epilogue_is_near_the_truth_for_every_type_and_level) {
  std::uint64_t seed = 100;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Activation activation : activations) {
      for (const bool gated : {false, true}) {
        if (gated && activation == Activation::none) continue;
        for (int repeat = 0; repeat < 6; ++repeat) {
          SeededRandom random(++seed);
          const Sizes n{random.between(1, 70), random.between(1, 90), random.between(1, 260)};
          Problem p = random_problem(random, n, dtype, activation, gated);
          check(p, random_context(random));
        }
      }
    }
  }
}

TEST(Gemm, tf32_is_allowed_where_it_is_asked_for_alone) {
  SeededRandom random(9);
  Problem p = random_problem(random, {3, 4, 5}, DType::f32, Activation::none, false);
  for (const Precision precision : {Precision::standard, Precision::strict, Precision::allow_tf32}) {
    p.options.precision = precision;
    EXPECT_EQ(checked_gemm(p.inputs(), p.options, {p.out.view()}, {}).problem.allow_tf32,
              precision == Precision::allow_tf32);
  }
}

TEST(Gemm, odd_and_large_shapes_are_near_the_truth) {
  std::uint64_t seed = 1;
  for (const Sizes n : {Sizes{1, 1, 1},
                        {1, 33, 1500},
                        {33, 1, 7},
                        {40, 500, 3},
                        {300, 40, 17},
                        {2, 3, 5000},
                        {150, 801, 193},
                        {7, 64, 1025},
                        {32, 31, 33}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SeededRandom random(++seed);
      Problem p = random_problem(random, n, dtype, Activation::silu, random.chance(0.5));
      check(p, random_context(random));
    }
  }
}

TEST(Gemm, no_rows_no_columns_and_nothing_to_sum_are_valid) {
  for (const Sizes n : {Sizes{0, 5, 7}, {5, 0, 7}, {5, 6, 0}, {50, 6, 0}, {0, 0, 0}}) {
    for (const std::string_view kernel : gemm_kernels()) {
      SeededRandom random(7);
      Problem p = random_problem(random, n, DType::f32, Activation::gelu, true);
      p.options.kernel = kernel;
      if (kernel != "simd" && kernel != "reference") continue;
      check(p, random_context(random));
    }
  }
}

TEST(Gemm, residual_may_be_out_itself) {
  SeededRandom random(3);
  for (const std::int64_t m : {3, 60}) {
    Problem p = random_problem(random, {m, 37, 50}, DType::f32, Activation::gelu, false);
    p.options.accumulate = false;
    p.residual = random_buffer(random, p.out.dtype(), {m, 37});
    const std::vector<double> truth = truth_of(p);
    const Plain plain = plain_of(p);
    run({p.a.view(), p.b.view(), p.bias.view(), {}, {}, p.residual.view()}, p.options, p.residual, {});
    expect_near(p.residual, truth, plain, "out", 4);
  }
}

TEST(Gemm, gate_and_up_may_be_views_of_one_tensor) {
  SeededRandom random(4);
  Problem p = random_problem(random, {40, 24, 30}, DType::f32, Activation::silu, true);
  Buffer both(DType::f32, {48, 30});
  std::vector<double> values = p.gate.values();
  const std::vector<double> up = p.b.values();
  values.insert(values.end(), up.begin(), up.end());
  both.set_values(values);
  const std::vector<double> truth = truth_of(p);
  const Plain plain = plain_of(p);
  Tensor gate = both.view(), b = both.view();
  gate.shape[0] = b.shape[0] = 24;
  b.data = static_cast<float*>(b.data) + 24 * 30;
  GemmInputs inputs = p.inputs();
  inputs.b = b;
  inputs.gate = gate;
  run(inputs, p.options, p.out, {});
  expect_near(p.out, truth, plain, "out", 4);
}

TEST(Gemm, gate_lies_as_b_does) {
  SeededRandom random(11);
  Problem p = random_problem(random, {4, 5, 6}, DType::f32, Activation::silu, true);
  p.gate = random_buffer(random, DType::f32, {5, 6}, 1, {.order = {1, 0}});
  p.b = random_buffer(random, DType::f32, {5, 6});
  const std::string text = thrown<InvalidArgument>([&] { run(p.inputs(), p.options, p.out, {}); });
  EXPECT_EQ(text, "gate: expected the same contiguous dimension as b, got the other");
}

TEST(Gemm, the_result_does_not_depend_on_threads) {
  SeededRandom random(5);
  for (const std::int64_t m : {3, 200}) {
    Problem p = random_problem(random, {m, 300, 500}, DType::bf16, Activation::gelu, true);
    p.options.accumulate = false;
    run(p.inputs(), p.options, p.out, {.parallel_for = serial_parallel_for()});
    const std::vector<std::byte> one = p.out.bytes();
    run(p.inputs(), p.options, p.out, {.parallel_for = openmp_parallel_for(3)});
    EXPECT_EQ(one, p.out.bytes());
  }
}

struct Mistake {
  std::string_view text;
  void (*make)(Problem&, GemmInputs&, GemmOptions&, Tensor& out);
};

TEST(Gemm, bad_input_is_named_and_nothing_is_written) {
  using P = Problem;
  using I = GemmInputs;
  using O = GemmOptions;
  const Mistake mistakes[] = {
      {"a: expected rank 2 [M, K], got none", [](P&, I& i, O&, Tensor&) { i.a = {}; }},
      {"a: expected f32, f16, bf16 or f64, got i32", [](P&, I& i, O&, Tensor&) { i.a.dtype = DType::i32; }},
      {"a: expected a matrix with a contiguous dimension, got strides 14 and 2",
       [](P&, I& i, O&, Tensor&) {
         i.a.strides[0] = 14;
         i.a.strides[1] = 2;
       }},
      {"b: expected rank 2 [N, K] with K 7, got f32[5, 6]", [](P&, I& i, O&, Tensor&) { i.b.shape[1] = 6; }},
      {"b: expected f32, got bf16", [](P&, I& i, O&, Tensor&) { i.b.dtype = DType::bf16; }},
      {"b: expected memory on cpu, got cuda:0",
       [](P&, I& i, O&, Tensor&) { i.b.device.type = Device::Type::cuda; }},
      {"bias: expected a value for each output = [5], got f32[4]",
       [](P&, I& i, O&, Tensor&) { i.bias.shape[0] = 4; }},
      {"gate_bias: expected a gate to add it to, got no gate",
       [](P& p, I& i, O&, Tensor&) { i.gate_bias = p.bias.view(); }},
      {"activation: expected an activation for the gate, got none",
       [](P& p, I& i, O& o, Tensor&) {
         i.gate = p.b.view();
         o.activation = Activation::none;
       }},
      {"out: expected [M, N] = [4, 5], got f32[4, 4]", [](P&, I&, O&, Tensor& out) { out.shape[1] = 4; }},
      {"out: expected f32 or the type of a, f32, got f16",
       [](P&, I&, O&, Tensor& out) { out.dtype = DType::f16; }},
      {"out: expected memory that does not overlap a, got an overlap",
       [](P&, I& i, O&, Tensor& out) { out.data = i.a.data; }},
      {"residual: expected [M, N] = [4, 5], got f32[5, 7]",
       [](P& p, I& i, O&, Tensor&) { i.residual = p.b.view(); }},
      {"kernel: expected one of auto, ", [](P&, I&, O& o, Tensor&) { o.kernel = "fast"; }},
  };
  for (const Mistake& mistake : mistakes) {
    SeededRandom random(6);
    Problem p;
    p.a = random_buffer(random, DType::f32, {4, 7});
    p.b = random_buffer(random, DType::f32, {5, 7});
    p.bias = random_buffer(random, DType::f32, {5});
    p.out = Buffer(DType::f32, {4, 5});
    p.options.activation = Activation::gelu;
    GemmInputs inputs = p.inputs();
    Tensor out = p.out.view();
    mistake.make(p, inputs, p.options, out);
    const std::vector<std::byte> before = p.out.bytes();
    const std::string text =
        thrown<InvalidArgument>([&] { gemm(inputs, p.options, GemmOutputs{out}, Context()); });
    EXPECT_EQ(text.substr(0, mistake.text.size()), mistake.text);
    EXPECT_EQ(before, p.out.bytes());
  }
}

TEST(Gemm, too_small_a_workspace_is_refused) {
  SeededRandom random(8);
  const Problem p = random_problem(random, {50, 50, 50}, DType::f32, Activation::none, false);
  const GemmOutputs outputs{p.out.view()};
  EXPECT_GT(gemm_workspace(p.inputs(), p.options, outputs, {}), 0u);
  const std::string text = thrown<InvalidArgument>([&] { gemm(p.inputs(), p.options, outputs, {}); });
  EXPECT_EQ(text.rfind("workspace: expected at least ", 0), 0u) << text;
}

TEST(Gemm, no_kernel_for_a_device_is_said_with_reasons) {
  SeededRandom random(9);
  Problem p = random_problem(random, {4, 4, 4}, DType::f32, Activation::none, false);
  Context context;
  context.device = {Device::Type::cuda, 0};
  GemmInputs inputs = p.inputs();
  GemmOutputs outputs{p.out.view()};
  for (Tensor* tensor : {&inputs.a, &inputs.b, &inputs.bias, &inputs.gate, &inputs.gate_bias,
                         &inputs.residual, &outputs.out}) {
    tensor->device = context.device;
  }
  p.options.kernel = "simd";
  const std::string text = thrown<Unsupported>([&] { gemm(inputs, p.options, outputs, context); });
  EXPECT_NE(text.find("simd: runs on the CPU only"), std::string::npos) << text;
}

TEST(Gemm, the_walk_is_explained) {
  SeededRandom random(10);
  Problem p = random_problem(random, {4, 5, 6}, DType::f64, Activation::none, false);
  p.bias = p.residual = {};
  p.out = Buffer(DType::f64, {4, 5});
  p.options.accumulate = false;
  const std::string text = to_string(explain_gemm(p.inputs(), p.options, {p.out.view()}, {}));
  EXPECT_EQ(text.rfind("gemm f64 M4 N5 K6 on cpu", 0), 0u) << text;
  EXPECT_NE(text.find("  simd: cannot: needs f32, f16 or bf16, got f64\n  reference: chosen\n"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace tilewise::test::gemm_test
