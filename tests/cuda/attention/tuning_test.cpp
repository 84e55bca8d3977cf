#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"
#include "tilewise/tuning.h"

// A user's measurements decide which row of a tuning table runs, and never what it computes.

namespace tilewise::test::attention_tuning_test {
namespace {

struct Case {
  const char* kernel;
  DType dtype;
  std::int64_t length, dim;
  const char* table;
  bool backward = false;
};

class AttentionTuning : public CudaTest {
 protected:
  void TearDown() override { use_tuning({}); }

  static RandomProblem problem_of(const Case& c) {
    RandomProblem problem = dense_problem(
        31, c.dtype, {.b = 1, .hq = 2, .hkv = 1, .sq = c.length, .sk = c.length, .d = c.dim, .dv = c.dim});
    problem.options.causal = true;
    problem.asked.backward = c.backward;
    return problem;
  }
  /// The question that the case's table is asked; none where the device has not that kernel.
  static std::vector<TuningQuestion> question(const Case& c) {
    const RandomProblem problem = problem_of(c);
    const Pass pass = c.backward ? Pass::backward : Pass::forward;
    if (!reason_against(problem, c.kernel, pass).empty()) return {};
    const DeviceProblem on_device(problem, c.kernel, Bits::any);
    std::vector<TuningQuestion> found;
    for (const TuningQuestion& asked : tuning_questions([&] {
           c.backward ? static_cast<void>(on_device.backward_plan())
                      : static_cast<void>(on_device.forward_plan());
         })) {
      if (asked.table == c.table) found.push_back(asked);
    }
    EXPECT_EQ(found.size(), 1u) << c.table;
    return found;
  }
  static TuningChoice choice(const TuningQuestion& question, std::size_t row) {
    return {question.device, question.table, question.problem, question.rows[row]};
  }
  static std::string reason_of_chosen(const Explanation& explanation) {
    for (const Explanation::Entry& entry : explanation.entries) {
      if (entry.verdict == Explanation::Verdict::chosen) return entry.reason;
    }
    return "none was chosen";
  }
};

constexpr Case cases[] = {
    {"wgmma", DType::bf16, 140, 64, "attention.sm90.forward"},
    {"wgmma", DType::f16, 140, 128, "attention.sm90.forward"},
    {"wgmma", DType::f32, 140, 64, "attention.sm90.forward_f32"},
    {"mma", DType::bf16, 140, 64, "attention.sm80.forward"},
    {"mma", DType::f16, 70, 256, "attention.sm80.forward"},
    {"mma", DType::f32, 140, 128, "attention.sm80.forward_f32"},
    {"mma", DType::bf16, 140, 128, "attention.sm80.backward", true},
    {"mma", DType::f32, 140, 128, "attention.sm80.backward_f32", true},
};

TEST_F(AttentionTuning, RunsEachRowWithinTheContract) {
  if (cuda::device_properties(0).compute_capability < 80) GTEST_SKIP() << "needs compute capability 8.0";
  int rows = 0;
  for (const Case& c : cases) {
    for (const TuningQuestion& asked : question(c)) {
      EXPECT_GE(asked.rows.size(), 2u) << c.table;
      const RandomProblem problem = problem_of(c);
      const Checker checker(problem, all_cores());
      for (std::size_t row = 0; row < asked.rows.size(); ++row) {
        SCOPED_TRACE(std::string(c.table) + ": " + asked.rows[row]);
        use_tuning(std::vector<TuningChoice>{choice(asked, row)});
        const DeviceProblem on_device(problem, c.kernel, Bits::any);
        const auto heard = tuning_questions([&] { on_device.run(Stream()); });
        bool taken = false;
        for (const TuningQuestion& again : heard) taken |= again.table == c.table && again.taken_row == row;
        EXPECT_TRUE(taken);
        Passes ran;
        const Subject subject{
            .kernel = c.kernel,
            .device = first_device,
            .repetition = 0,
            .forward = [&](const AttentionInputs&, const AttentionOptions&, const AttentionOutputs& outputs,
                           const Context&) { on_device.download(outputs); },
            .backward = [&](const AttentionInputs&, const AttentionOptions&,
                            const AttentionGradients& gradients,
                            const Context&) { on_device.download(gradients); }};
        for (const std::string& failure : checker.check(subject, &ran)) ADD_FAILURE() << failure;
        EXPECT_TRUE(ran.forward);
        EXPECT_EQ(ran.backward, c.backward);
        ++rows;
        use_tuning({});
      }
    }
  }
  EXPECT_GT(rows, 0);
}

TEST_F(AttentionTuning, IsExplained) {
  for (const Case& c : cases) {
    if (c.backward) continue;
    for (const TuningQuestion& asked : question(c)) {
      const DeviceProblem on_device(problem_of(c), c.kernel);
      EXPECT_EQ(reason_of_chosen(on_device.forward_plan().explain()), "");
      const std::size_t other = asked.default_row == 0 ? 1 : 0;
      use_tuning(std::vector<TuningChoice>{choice(asked, other)});
      EXPECT_EQ(reason_of_chosen(on_device.forward_plan().explain()), "tuned here: " + asked.rows[other]);
      use_tuning({});
    }
  }
}

// A plan keeps its row, whatever is measured later.
TEST_F(AttentionTuning, LeavesPlansAsTheyAre) {
  for (const Case& c : cases) {
    if (c.backward) continue;
    for (const TuningQuestion& asked : question(c)) {
      const DeviceProblem on_device(problem_of(c), c.kernel);
      const AttentionPlan plan = on_device.forward_plan();
      const Stream stream;
      on_device.poison(stream);
      on_device.run(plan, {}, stream);
      stream.wait();
      const std::vector<std::byte> before = on_device.outputs();
      use_tuning(std::vector<TuningChoice>{choice(asked, asked.default_row == 0 ? 1 : 0)});
      on_device.poison(stream);
      EXPECT_TRUE(tuning_questions([&] { on_device.run(plan, {}, stream); }).empty());
      stream.wait();
      EXPECT_TRUE(on_device.outputs() == before) << c.table;
      use_tuning({});
    }
  }
}

TEST_F(AttentionTuning, TuneCallTimesEveryRow) {
  for (const Case& c : cases) {
    for (const TuningQuestion& asked : question(c)) {
      const DeviceProblem on_device(problem_of(c), c.kernel, Bits::any);
      // Times that make the last row the fastest.
      const auto found = tune_call(
          [&] {
            double time = 0;
            for (const TuningQuestion& now : tuning_questions([&] {
                   c.backward ? static_cast<void>(on_device.backward_plan())
                              : static_cast<void>(on_device.forward_plan());
                 })) {
              if (now.table == c.table) time += 10.0 - static_cast<double>(now.taken_row);
            }
            return time;
          },
          1);
      bool tuned = false;
      for (const TuningChoice& choice : found)
        tuned |= choice.table == c.table && choice.row == asked.rows.back();
      EXPECT_TRUE(tuned) << c.table;
      EXPECT_EQ(tuning_from_json(tuning_to_json(found)).size(), found.size());
    }
  }
}

}  // namespace
}  // namespace tilewise::test::attention_tuning_test
