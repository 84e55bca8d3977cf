#include "property/check.h"

#include <algorithm>
#include <exception>

#include "support/math_path.h"

namespace tilewise::test {
namespace {

// Two computations in f64 agree this much better than f32 does (2^-29 by itself).
constexpr double f64_to_f32 = 1e-6;

bool able(const Explanation& explanation, const std::string& kernel) {
  return std::any_of(explanation.entries.begin(), explanation.entries.end(),
                     [&](const Explanation::Entry& entry) {
                       return entry.kernel == kernel && entry.verdict != Explanation::Verdict::unable;
                     });
}

// One thread that takes the tasks from the last to the first, under the name of several.
ParallelFor backwards_parallel_for(int threads) {
  return {.run =
              [](std::int64_t n, const ParallelFor::Body& body) {
                for (std::int64_t index = n; index-- > 0;) body(index);
              },
          .threads = threads};
}

AttentionGradients view(const RandomProblem& problem, const OutputBuffers& outputs,
                        const GradientBuffers& gradients) {
  return {.o = outputs.o.view(),
          .lse = outputs.lse.view(),
          .d_o = problem.d_o.view(),
          .d_lse = problem.d_lse.view(),
          .dq = gradients.dq.view(),
          .dk = gradients.dk.view(),
          .dv = gradients.dv.view(),
          .dmask = gradients.dmask.view(),
          .dsinks = gradients.dsinks.view()};
}

std::vector<std::byte> input_bytes(const RandomProblem& p) {
  std::vector<std::byte> all;
  for (const Buffer* buffer :
       {&p.q, &p.k, &p.v, &p.mask, &p.alibi_slopes, &p.sinks, &p.key_lengths, &p.page_table, &p.cumulative_q,
        &p.cumulative_k, &p.blocks.counts, &p.blocks.indices, &p.blocks.full_counts, &p.blocks.full_indices,
        &p.blocks.tile_ids, &p.blocks.tiles, &p.d_o, &p.d_lse}) {
    if (!buffer->given()) continue;
    const std::vector<std::byte> bytes = buffer->bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

// The reference agrees with the formula.
void compare_reference(const std::string& name, const Buffer& reference, const std::vector<double>& formula,
                       const std::vector<double>& rounding, std::vector<std::string>& failures) {
  Expectation expectation{name, formula, {}, 0};
  for (std::size_t n = 0; n < rounding.size(); ++n) {
    expectation.allowed.push_back(f64_to_f32 * rounding[n]);
    expectation.allowed_norm += expectation.allowed.back();
  }
  const std::string text = mismatch(expectation, reference);
  if (!text.empty()) failures.push_back("reference in f64: " + text);
}

}  // namespace

Checker::Checker(const RandomProblem& problem, int threads)
    : problem_(problem), threads_(threads), differentiable_(problem.layout != Layout::paged) {
  const RandomProblem wide = widened(problem);
  const OpenProblem open(problem);
  const OutputBuffers outputs = make_outputs(wide);
  const Context context{.parallel_for = serial_parallel_for()};
  AttentionOptions options = problem.options;
  options.kernel = "reference";
  run_forward(wide.inputs(), options, outputs.view(), context);
  GradientBuffers gradients;
  if (differentiable_) {
    gradients = make_gradients(wide);
    run_backward(wide.inputs(), options, view(wide, outputs, gradients), context);
  }

  const Results formula = math_path(open, DType::f64);
  const Results math = math_path(open, problem.dtype);
  const Results rounding = rounding_error(open);
  const auto expect = [&](Expectation& expectation, const char* name, const Buffer& reference,
                          std::vector<double> Results::* result) {
    if (!reference.given()) return;
    truth_.*result = reference.values();
    expectation = expect_like_math_path(name, truth_.*result, math.*result, rounding.*result);
    compare_reference(name, reference, formula.*result, rounding.*result, reference_failures_);
  };
  expect(o_, "o", outputs.o, &Results::o);
  expect(lse_, "lse", outputs.lse, &Results::lse);
  lse_ = expect_statistics("lse", truth_.lse, rounding.lse);
  expect(dq_, "dq", gradients.dq, &Results::dq);
  expect(dk_, "dk", gradients.dk, &Results::dk);
  expect(dv_, "dv", gradients.dv, &Results::dv);
  expect(dmask_, "dmask", gradients.dmask, &Results::dmask);
  expect(dsinks_, "dsinks", gradients.dsinks, &Results::dsinks);
}

// What the checks of one subject share.
struct Checker::Run {
  const Subject& subject;
  Random rng;
  Context context;  // of the run that is compared with the truth
  Context other;    // of the run that must give the same bits
  AttentionOptions options;
  OutputBuffers outputs;
  std::vector<std::string> failures{};

  void fail(const std::string& pass, const std::string& text) {
    const std::string level = subject.level.empty() ? "" : " " + subject.level;
    failures.push_back(subject.kernel + level + " " + pass + ": " + text);
  }

  void compare(const std::string& pass, const Expectation& expectation, const Buffer& buffer) {
    if (!buffer.given()) return;
    if (!buffer.guards_intact()) fail(pass, expectation.name + ": written outside its elements");
    if (!buffer.all_written()) fail(pass, expectation.name + ": not all of it is written");
    const std::string text = mismatch(expectation, buffer);
    if (!text.empty()) fail(pass, text);
  }
};

std::vector<std::string> Checker::check(const Subject& subject) const {
  Random rng(problem_.seed + 3);
  const int threads = static_cast<int>(rng.between(1, 7));
  Run run{.subject = subject,
          .rng = rng,
          .context = {.parallel_for = openmp_parallel_for(threads_), .simd_level = subject.level},
          .other = {.parallel_for =
                        rng.chance(0.5) ? backwards_parallel_for(threads) : openmp_parallel_for(threads),
                    .simd_level = subject.level},
          .options = problem_.options,
          .outputs = make_outputs(problem_)};
  run.options.kernel = subject.kernel;
  const std::vector<std::byte> inputs = input_bytes(problem_);
  try {
    check_forward(run);
    if (differentiable_) check_backward(run);
  } catch (const std::exception& error) {
    run.fail("call", std::string("threw ") + error.what());
  }
  if (input_bytes(problem_) != inputs) run.fail("call", "an input was written");
  return run.failures;
}

void Checker::check_forward(Run& run) const {
  const AttentionInputs inputs = problem_.inputs();
  const AttentionOutputs outputs = run.outputs.view();
  Context where = run.context;
  where.device = run.subject.device;
  if (!able(explain_attention_forward(on_device(inputs, where.device), run.options,
                                      on_device(outputs, where.device), where),
            run.subject.kernel)) {
    return;
  }
  run.subject.forward(inputs, run.options, outputs, run.context);
  run.compare("forward", o_, run.outputs.o);
  run.compare("forward", lse_, run.outputs.lse);

  if (!run.rng.chance(run.subject.repetition)) return;
  const std::vector<std::byte> o = run.outputs.o.bytes();
  const std::vector<std::byte> lse = run.outputs.lse.bytes();
  const bool with_lse = run.rng.chance(0.5);
  run.outputs.o.poison();
  run.subject.forward(inputs, run.options, run.outputs.view(with_lse), run.other);
  if (run.outputs.o.bytes() != o) {
    run.fail("forward",
             with_lse ? "o: another run gives other bits" : "o: a run without lse gives other bits");
  }
  if (run.outputs.lse.bytes() != lse) run.fail("forward", "lse: another run gives other bits");
}

void Checker::check_backward(Run& run) const {
  if (!problem_.asked.own_forward) {
    run.outputs.o.set_values(truth_.o);
    run.outputs.lse.set_values(truth_.lse);
  }
  const GradientBuffers buffers = make_gradients(problem_);
  const AttentionInputs inputs = problem_.inputs();
  const AttentionGradients gradients = view(problem_, run.outputs, buffers);
  Context where = run.context;
  where.device = run.subject.device;
  if (!able(explain_attention_backward(on_device(inputs, where.device), run.options,
                                       on_device(gradients, where.device), where),
            run.subject.kernel)) {
    return;
  }
  run.subject.backward(inputs, run.options, gradients, run.context);
  struct Written {
    const Expectation& expectation;
    Buffer buffer;
    std::vector<std::byte> bytes{};
  };
  std::vector<Written> written;
  for (const auto& [expectation, buffer] :
       {std::pair(&dq_, &buffers.dq), std::pair(&dk_, &buffers.dk), std::pair(&dv_, &buffers.dv),
        std::pair(&dmask_, &buffers.dmask), std::pair(&dsinks_, &buffers.dsinks)}) {
    if (!buffer->given()) continue;
    run.compare("backward", *expectation, *buffer);
    written.push_back({*expectation, *buffer, buffer->bytes()});
  }

  // On the CPU always, elsewhere on request.
  if (run.subject.device.type != Device::Type::cpu && !run.options.deterministic) return;
  if (!run.rng.chance(run.subject.repetition)) return;
  for (Written& result : written) result.buffer.poison();
  run.subject.backward(inputs, run.options, gradients, run.other);
  for (const Written& result : written) {
    if (result.buffer.bytes() != result.bytes) {
      run.fail("backward", result.expectation.name + ": another run gives other bits");
    }
  }
}

}  // namespace tilewise::test
