#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "attention/kernel.h"
#include "attention/problem.h"
#include "attention/validate_case.h"

namespace tilewise::test::select_test {
namespace {

using Verdict = Explanation::Verdict;

// A dense f64 call, which the reference alone takes.
Scene dense_f64() {
  Scene s;
  s.inputs.q = s.zeros(DType::f64, {2, 4, 3, 4});
  s.inputs.k = s.zeros(DType::f64, {2, 2, 5, 4});
  s.inputs.v = s.zeros(DType::f64, {2, 2, 5, 6});
  s.outputs.o = s.make(DType::f64, {2, 4, 3, 6});
  s.outputs.lse = s.make(DType::f64, {2, 4, 3});
  return s;
}

AttentionProblem problem_f32() {
  return {.dtype = DType::f32,
          .batch = 2,
          .heads_q = 8,
          .heads_kv = 2,
          .length_q = 128,
          .length_k = 256,
          .dim_qk = 64,
          .dim_v = 32};
}

AttentionProblem problem_f64() {
  AttentionProblem problem = problem_f32();
  problem.dtype = DType::f64;
  return problem;
}

const Explanation::Entry& entry_of(const Explanation& explanation, std::string_view kernel) {
  for (const Explanation::Entry& entry : explanation.entries) {
    if (entry.kernel == kernel) return entry;
  }
  throw std::out_of_range("no such kernel");
}

TEST(KernelList, IsFastestFirstAndEndsWithTheReference) {
  const std::vector<std::string_view> names = attention_kernels();
  ASSERT_GE(names.size(), 2u);  // builds for more devices have more, before these
  EXPECT_EQ(names[names.size() - 2], "simd");
  EXPECT_EQ(names.back(), "reference");
  ASSERT_EQ(attention_kernel_list().size(), names.size());
  for (std::size_t n = 0; n < names.size(); ++n) EXPECT_EQ(attention_kernel_list()[n].name, names[n]);
}

TEST(KernelList, EveryKernelIsComplete) {
  for (const AttentionKernel& kernel : attention_kernel_list()) {
    EXPECT_NE(kernel.supports, nullptr) << kernel.name;
    // Either it has configurations, or it needs none.
    EXPECT_NE(kernel.workspace == nullptr, kernel.configure == nullptr) << kernel.name;
    EXPECT_NE(kernel.launch == nullptr, kernel.launch_configured == nullptr) << kernel.name;
    EXPECT_EQ(kernel.launch == nullptr, kernel.workspace == nullptr) << kernel.name;
  }
}

TEST(ChooseKernel, TakesTheFirstAbleOne) {
  EXPECT_EQ(choose_attention_kernel(problem_f32(), "auto").name, "simd");
  EXPECT_EQ(choose_attention_kernel(problem_f64(), "auto").name, "reference");
}

TEST(ChooseKernel, TakesTheNamedOne) {
  EXPECT_EQ(choose_attention_kernel(problem_f32(), "reference").name, "reference");
  EXPECT_EQ(choose_attention_kernel(problem_f32(), "simd").name, "simd");
}

TEST(ChooseKernel, RefusesUnknownNamesAndListsTheKnown) {
  std::string known = "auto";
  for (const std::string_view name : attention_kernels()) known += ", " + std::string(name);
  for (const std::string_view name : {"Simd", "", "simd ", "ref"}) {
    const std::string expected = "kernel: expected one of " + known + ", got '" + std::string(name) + "'";
    EXPECT_EQ(message_of<InvalidArgument>([&] { choose_attention_kernel(problem_f32(), name); }), expected);
    EXPECT_EQ(message_of<InvalidArgument>([&] { check_kernel_name(attention_kernel_list(), name); }),
              expected);
  }
  for (const std::string_view name : {"auto", "simd", "reference"})
    EXPECT_NO_THROW(check_kernel_name(attention_kernel_list(), name));
}

TEST(ChooseKernel, ANamedKernelThatCannotThrowsItsReason) {
  const std::string reason = cpu::simd_attention.supports(problem_f64());
  ASSERT_FALSE(reason.empty());
  const std::string message = message_of<Unsupported>([] { choose_attention_kernel(problem_f64(), "simd"); });
  EXPECT_EQ(message,
            "kernel 'simd' cannot take this problem (" + to_string(problem_f64()) + "):\n  simd: " + reason);
}

TEST(ChooseKernel, AutoGivesEveryReasonWhenNoneCan) {
  AttentionProblem problem = problem_f32();
  problem.layout = Layout::paged;
  problem.pass = Pass::backward;
  const std::string message = message_of<Unsupported>([&] { choose_attention_kernel(problem, "auto"); });
  for (const AttentionKernel& kernel : attention_kernel_list()) {
    const std::string reason = kernel.supports(problem);
    ASSERT_FALSE(reason.empty()) << kernel.name;
    EXPECT_NE(message.find("\n  " + std::string(kernel.name) + ": " + reason), std::string::npos) << message;
  }
}

TEST(ChooseKernel, CallsByTheNameOfAKernelThatCannotThrowAndWriteNothing) {
  Scene scene = dense_f64();
  scene.provide_workspace();
  scene.options.kernel = "simd";
  const std::vector<std::byte> before = scene.memory();
  const std::string message = message_of<Unsupported>([&] { scene.call(); });
  EXPECT_TRUE(scene.memory() == before) << "something was written";
  EXPECT_NE(message.find("kernel 'simd'"), std::string::npos) << message;
  EXPECT_NE(message.find("forward f64 dense"), std::string::npos) << message;
}

TEST(Explain, SaysChosenAbleAndCannotWithTheReason) {
  const Explanation f32 = dense().explain();
  ASSERT_EQ(f32.entries.size(), attention_kernels().size());
  EXPECT_EQ(entry_of(f32, "simd").verdict, Verdict::chosen);
  EXPECT_EQ(entry_of(f32, "reference").verdict, Verdict::able);
  EXPECT_EQ(entry_of(f32, "reference").reason, "");

  const Explanation f64 = dense_f64().explain();
  EXPECT_EQ(entry_of(f64, "simd").verdict, Verdict::unable);
  EXPECT_NE(entry_of(f64, "simd").reason, "");
  EXPECT_EQ(entry_of(f64, "reference").verdict, Verdict::chosen);
}

TEST(Explain, WalksTheListInOrder) {
  const Explanation explanation = dense().explain();
  std::vector<std::string_view> names;
  for (const Explanation::Entry& entry : explanation.entries) names.push_back(entry.kernel);
  EXPECT_EQ(names, attention_kernels());
}

TEST(Explain, TheNamedKernelIsTheChosenOne) {
  Scene scene = dense();
  scene.options.kernel = "reference";
  const Explanation explanation = scene.explain();
  EXPECT_EQ(entry_of(explanation, "simd").verdict, Verdict::able);
  EXPECT_EQ(entry_of(explanation, "reference").verdict, Verdict::chosen);
}

TEST(Explain, NothingIsChosenWhenTheNamedKernelCannot) {
  Scene scene = dense_f64();
  scene.options.kernel = "simd";
  const Explanation explanation = scene.explain();
  EXPECT_EQ(entry_of(explanation, "simd").verdict, Verdict::unable);
  EXPECT_EQ(entry_of(explanation, "reference").verdict, Verdict::able);
}

TEST(Explain, PagedBackwardHasNoKernelAndSaysWhy) {
  for (const Explanation::Entry& entry : backward_of(paged()).explain().entries) {
    EXPECT_EQ(entry.verdict, Verdict::unable) << entry.kernel;
    EXPECT_NE(entry.reason, "") << entry.kernel;
  }
}

TEST(Explain, PrintsTheProblemAndALineAKernel) {
  const Explanation explanation{.problem = "the problem",
                                .entries = {{"first", Verdict::unable, "too small"},
                                            {"second", Verdict::chosen, ""},
                                            {"third", Verdict::able, ""}}};
  EXPECT_EQ(to_string(explanation),
            "the problem\n  first: cannot: too small\n  second: chosen\n  third: able\n");
}

TEST(Explain, ProblemFollowsTheArguments) {
  EXPECT_EQ(dense().explain().problem, "forward f32 dense B2 Hq4 Hkv2 Sq3 Sk5 D4 Dv6 on cpu");
  EXPECT_EQ(packed().explain().problem, "forward f32 packed B2 Hq4 Hkv2 Sq3 Sk4 D4 Dv6 on cpu");
  EXPECT_EQ(paged().explain().problem, "forward f32 paged B2 Hq4 Hkv2 Sq3 Sk6 D4 Dv6 on cpu, key lengths");
  Scene scene = backward();
  scene.options.causal = true;
  scene.options.window.left = 3;
  scene.options.softcap = 20;
  scene.options.dropout.probability = 0.1f;
  EXPECT_EQ(
      scene.explain().problem,
      "backward f32 dense B2 Hq4 Hkv2 Sq3 Sk5 D4 Dv6 on cpu, additive mask, mask gradient, causal, window, "
      "softcap, alibi, sinks, dropout, key lengths, block mask, logit scale");
}

TEST(Problem, PrintsEveryFeature) {
  AttentionProblem problem = problem_f32();
  EXPECT_EQ(to_string(problem), "forward f32 dense B2 Hq8 Hkv2 Sq128 Sk256 D64 Dv32 on cpu");
  problem.pass = Pass::backward;
  problem.layout = Layout::packed;
  problem.dtype = DType::bf16;
  problem.device = {Device::Type::cuda, 1};
  problem.features.mask = MaskKind::boolean;
  problem.features.window = true;
  EXPECT_EQ(to_string(problem),
            "backward bf16 packed B2 Hq8 Hkv2 Sq128 Sk256 D64 Dv32 on cuda:1, boolean mask, window");
}

TEST(Problem, ComparesByEveryField) {
  EXPECT_EQ(problem_f32(), problem_f32());
  EXPECT_NE(problem_f32(), problem_f64());
  AttentionProblem other = problem_f32();
  other.features.sinks = true;
  EXPECT_NE(other, problem_f32());
}

}  // namespace
}  // namespace tilewise::test::select_test
