#include "property/check.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string_view>

#include "support/math_path.h"

namespace tilewise::test {
namespace {

// Two computations in f64 agree up to this error, relative to the size of their terms (the unit of f32 is
// 6e-8). The absolute rounding error of a score becomes a relative error of its P, and a mask can make scores
// large. So eight units of f64 are added per unit of the largest mask or ALiBi value.
double f64_agreement(const OpenProblem& open) {
  double largest = 0;
  const auto take = [&](const std::vector<double>& added) {
    for (const double x : added) {
      if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    }
  };
  open.for_each_head([&](const Head& head) {
    take(head.mask);
    take(head.alibi);
  });
  return 1e-12 + 8 * std::numeric_limits<double>::epsilon() * largest;
}

bool able(const Explanation& explanation, const std::string& kernel) {
  return std::any_of(explanation.entries.begin(), explanation.entries.end(),
                     [&](const Explanation::Entry& entry) {
                       return entry.kernel == kernel && entry.verdict != Explanation::Verdict::unable;
                     });
}

// Claims to have several threads, but runs tasks on one thread, from the last to the first.
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
          .dsinks = gradients.dsinks.view(),
          .dlogit_scale = gradients.dlogit_scale.view()};
}

std::vector<std::byte> input_bytes(const RandomProblem& p) {
  std::vector<std::byte> all;
  for (const Buffer* buffer :
       {&p.q, &p.k, &p.v, &p.mask, &p.alibi_slopes, &p.sinks, &p.logit_scale, &p.key_lengths, &p.page_table,
        &p.cumulative_q, &p.cumulative_k, &p.blocks.counts, &p.blocks.indices, &p.blocks.full_counts,
        &p.blocks.full_indices, &p.blocks.tile_ids, &p.blocks.tiles, &p.d_o, &p.d_lse}) {
    if (!buffer->given()) continue;
    const std::vector<std::byte> bytes = buffer->bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

// The truth, from the reference kernel in f64, which must agree with the formula.
Results reference_truth(const RandomProblem& problem, const OpenProblem& open, const Results& sizes,
                        int threads, std::vector<std::string>& failures) {
  const RandomProblem wide = widened(problem);
  const OutputBuffers outputs = make_outputs(wide);
  const Context context{.parallel_for = openmp_parallel_for(threads)};
  AttentionOptions options = problem.options;
  options.kernel = "reference";
  run_forward(wide.inputs(), options, outputs.view(), context);
  GradientBuffers gradients;
  if (problem.layout != Layout::paged && problem.asked.backward) {
    gradients = make_gradients(wide);
    run_backward(wide.inputs(), options, view(wide, outputs, gradients), context);
  }
  Results truth;
  const Results exact = formula(open);
  const double agreement = f64_agreement(open);
  const auto take = [&](const char* name, const Buffer& reference, std::vector<double> Results::* result) {
    if (!reference.given()) return;
    truth.*result = reference.values();
    for (std::size_t n = 0; n < (truth.*result).size(); ++n) {
      const double got = (truth.*result)[n];
      const double expected = (exact.*result)[n];
      if (got == expected || std::abs(got - expected) <= agreement * (sizes.*result)[n]) continue;
      std::ostringstream text;
      text << std::setprecision(17) << "reference in f64: " << name << " element " << n << " is " << got
           << ", by the formula " << expected;
      failures.push_back(text.str());
      return;
    }
  };
  take("o", outputs.o, &Results::o);
  take("lse", outputs.lse, &Results::lse);
  take("dq", gradients.dq, &Results::dq);
  take("dk", gradients.dk, &Results::dk);
  take("dv", gradients.dv, &Results::dv);
  take("dmask", gradients.dmask, &Results::dmask);
  take("dsinks", gradients.dsinks, &Results::dsinks);
  take("dlogit_scale", gradients.dlogit_scale, &Results::dlogit_scale);
  return truth;
}

}  // namespace

Rule rule_of(const std::string& kernel, const AttentionOptions& options) {
  const bool rounds = kernel == "mma" || kernel.starts_with("wgmma");
  return rounds && options.precision != Precision::strict ? Rule::standard : Rule::strict;
}

Checker::Checker(const RandomProblem& problem, int threads, std::optional<Rule> rule)
    : problem_(problem),
      threads_(threads),
      differentiable_(problem.layout != Layout::paged && problem.asked.backward),
      sizes_(term_sizes(OpenProblem(problem))),
      truth_(reference_truth(problem, OpenProblem(problem), sizes_, threads, reference_failures_)),
      rule_(rule) {}

MathPathErrors& Checker::errors_of(Rule rule) const {
  std::optional<MathPathErrors>& errors = rule == Rule::strict ? strict_errors_ : standard_errors_;
  if (!errors) errors.emplace(OpenProblem(problem_), truth_, threads_, rule);
  return *errors;
}

// The state of the checks of one subject.
struct Checker::Run {
  const Subject& subject;
  Random rng;
  Context context;  // for the run that is compared with the truth
  Context other;    // for the run that must give the same bits
  AttentionOptions options;
  OutputBuffers outputs;
  Passes ran{};
  std::vector<std::string> failures{};

  void fail(const std::string& pass, const std::string& text) {
    const std::string level = subject.level.empty() ? "" : " " + subject.level;
    failures.push_back(subject.kernel + level + " " + pass + ": " + text);
  }
};

void Checker::compare(Run& run, const char* pass, const char* name, std::vector<double> Results::* result,
                      const Buffer& got) const {
  if (!got.given()) return;
  if (!got.guards_intact()) run.fail(pass, std::string(name) + ": written outside its elements");
  if (!got.all_written()) run.fail(pass, std::string(name) + ": not all of it is written");
  MathPathErrors& errors = errors_of(rule_.value_or(rule_of(run.subject.kernel, run.options)));
  const std::string text = errors.mismatch({name, truth_.*result, sizes_.*result}, result, got);
  if (!text.empty()) run.fail(pass, text);
}

std::vector<std::string> Checker::check(const Subject& subject, Passes* ran) const {
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
  if (ran != nullptr) *ran = run.ran;
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
  run.ran.forward = true;
  run.subject.forward(inputs, run.options, outputs, run.context);
  compare(run, "forward", "o", &Results::o, run.outputs.o);
  compare(run, "forward", "lse", &Results::lse, run.outputs.lse);

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
  if (!problem_.asked.own_forward || !run.ran.forward) {
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
  run.ran.backward = true;
  run.subject.backward(inputs, run.options, gradients, run.context);
  struct Written {
    const char* name;
    Buffer buffer;
    std::vector<std::byte> bytes{};
  };
  std::vector<Written> written;
  const auto take = [&](const char* name, std::vector<double> Results::* result, const Buffer& buffer) {
    if (!buffer.given()) return;
    compare(run, "backward", name, result, buffer);
    written.push_back({name, buffer, buffer.bytes()});
  };
  take("dq", &Results::dq, buffers.dq);
  take("dk", &Results::dk, buffers.dk);
  take("dv", &Results::dv, buffers.dv);
  take("dmask", &Results::dmask, buffers.dmask);
  take("dsinks", &Results::dsinks, buffers.dsinks);
  take("dlogit_scale", &Results::dlogit_scale, buffers.dlogit_scale);

  // On the CPU all gradients have the same bits each time. On a GPU they do with `deterministic`. Without it,
  // those of f16 and bf16 do except for dq, which is checked in some of the problems; `widened` is different,
  // since it uses the kernels for f32.
  const bool all = run.subject.device.type == Device::Type::cpu || run.options.deterministic;
  const bool but_dq =
      (problem_.dtype == DType::f16 || problem_.dtype == DType::bf16) && run.subject.kernel != "widened";
  if (!run.rng.chance(run.subject.repetition * (all ? 1.0 : but_dq ? 0.25 : 0.0))) return;
  run.ran.backward_again = true;
  for (Written& result : written) result.buffer.poison();
  run.subject.backward(inputs, run.options, gradients, run.other);
  for (const Written& result : written) {
    const std::string_view name = result.name;
    if (!all && (name == "dq" || name == "dlogit_scale")) continue;
    if (result.buffer.bytes() != result.bytes) {
      run.fail("backward", std::string(result.name) + ": another run gives other bits");
    }
  }
}

}  // namespace tilewise::test
