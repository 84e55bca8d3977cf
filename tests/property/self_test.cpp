#include "property/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "core/load.h"
#include "property/check.h"
#include "support/math_path.h"

namespace tilewise::test {
namespace {

// A small problem with many features, in which every key and every option affects the results.
RandomProblem plain_problem(DType dtype, std::int64_t length_q = 5, std::int64_t length_k = 7) {
  Random rng(1);
  RandomProblem p;
  p.dtype = dtype;
  p.batch = 2;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.length_q = length_q;
  p.length_k = length_k;
  p.dim_qk = 8;
  p.dim_v = 6;
  p.q = Buffer(dtype, {2, 4, length_q, 8});
  p.k = Buffer(dtype, {2, 2, length_k, 8});
  p.v = Buffer(dtype, {2, 2, length_k, 6});
  p.d_o = Buffer(dtype, {2, 4, length_q, 6});
  p.d_lse = Buffer(DType::f32, {2, 4, length_q});
  p.mask = Buffer(DType::f32, {length_q, length_k});
  p.sinks = Buffer(DType::f32, {4});
  p.logit_scale = Buffer(DType::f32, {4});
  for (Buffer* buffer : {&p.q, &p.k, &p.v, &p.d_o, &p.d_lse, &p.mask, &p.sinks, &p.logit_scale})
    buffer->fill_random(rng);
  p.options.causal = true;
  p.options.alignment = Alignment::bottom_right;
  p.options.dropout = {.probability = 0.2f, .seed = 12};
  p.asked.dmask = true;
  p.asked.dsinks = true;
  p.asked.dlogit_scale = true;
  return p;
}

// A fault: the reference with changed arguments or changed results.
struct Fault {
  std::string name;
  std::string found_as;  // a part of the text of the failure
  std::function<void(AttentionInputs&, AttentionOptions&)> before{};
  std::function<void(const AttentionOutputs&)> after_forward{};
  std::function<void(const AttentionGradients&)> after_backward{};
};

Subject subject_of(const Fault& fault) {
  return {.kernel = "reference",
          .forward =
              [&fault](AttentionInputs inputs, AttentionOptions options, const AttentionOutputs& outputs,
                       Context context) {
                if (fault.before) fault.before(inputs, options);
                run_forward(inputs, options, outputs, std::move(context));
                if (fault.after_forward) fault.after_forward(outputs);
              },
          .backward =
              [&fault](AttentionInputs inputs, AttentionOptions options, const AttentionGradients& gradients,
                       Context context) {
                if (fault.before) fault.before(inputs, options);
                run_backward(inputs, options, gradients, std::move(context));
                if (fault.after_backward) fault.after_backward(gradients);
              }};
}

std::byte* bytes_of(const Tensor& tensor) { return static_cast<std::byte*>(tensor.data); }

void shift_last(const Tensor& tensor, double distance) {
  const std::int64_t last = tensor.size() - 1;
  store_element(bytes_of(tensor), tensor.dtype, last,
                load_element(bytes_of(tensor), tensor.dtype, last) + distance);
}

void leave_last_unwritten(const Tensor& tensor) {
  const std::size_t width = size_of(tensor.dtype);
  std::fill_n(bytes_of(tensor) + static_cast<std::size_t>(tensor.size() - 1) * width, width, std::byte{0xFF});
}

std::vector<Fault> faults() {
  static std::int32_t one_key_less[] = {6, 6};
  static int runs = 0;
  using Inputs = AttentionInputs;
  using Options = AttentionOptions;
  using Outputs = AttentionOutputs;
  using Gradients = AttentionGradients;
  return {
      {.name = "one element of o off",
       .found_as = "forward: o[",
       .after_forward = [](const Outputs& out) { shift_last(out.o, 0.1); }},
      {.name = "lse off",
       .found_as = "forward: lse[",
       .after_forward =
           [](const Outputs& out) {
             if (out.lse.given()) shift_last(out.lse, 1e-4);
           }},
      {.name = "o not written",
       .found_as = "o: not all",
       .after_forward = [](const Outputs& out) { leave_last_unwritten(out.o); }},
      {.name = "written before o",
       .found_as = "o: written outside",
       .after_forward = [](const Outputs& out) { bytes_of(out.o)[-1] = std::byte{1}; }},
      {.name = "o not repeatable",
       .found_as = "forward: o: a",
       .after_forward = [](const Outputs& out) { bytes_of(out.o)[0] ^= std::byte{++runs % 2 == 1}; }},
      {.name = "an input written",
       .found_as = "an input was written",
       .before = [](Inputs& in, Options&) { bytes_of(in.k)[0] = std::byte{0x11}; }},
      {.name = "a key skipped",
       .found_as = "forward: o[",
       .before = [](Inputs& in, Options&) { in.key_lengths = Tensor::of(one_key_less, {2}); }},
      {.name = "scale off",
       .found_as = "forward: o[",
       .before = [](Inputs&, Options& options) { options.scale = 0.4f; }},
      {.name = "causal ignored",
       .found_as = "forward: o[",
       .before = [](Inputs&, Options& options) { options.causal = false; }},
      {.name = "causal aligned otherwise",
       .found_as = "forward: o[",
       .before = [](Inputs&, Options& options) { options.alignment = Alignment::top_left; }},
      {.name = "mask ignored",
       .found_as = "forward: o[",
       .before = [](Inputs& in, Options&) { in.mask = {}; }},
      {.name = "sinks ignored",
       .found_as = "forward: lse[",
       .before = [](Inputs& in, Options&) { in.sinks = {}; }},
      {.name = "logit scale ignored",
       .found_as = "forward: lse[",
       .before = [](Inputs& in, Options&) { in.logit_scale = {}; }},
      {.name = "another dropout",
       .found_as = "forward: o[",
       .before = [](Inputs&, Options& options) { ++options.dropout.seed; }},
      {.name = "dq off",
       .found_as = "backward: dq[",
       .after_backward = [](const Gradients& out) { shift_last(out.dq, 0.2); }},
      {.name = "dk off",
       .found_as = "backward: dk[",
       .after_backward = [](const Gradients& out) { shift_last(out.dk, 0.2); }},
      {.name = "dv off",
       .found_as = "backward: dv[",
       .after_backward = [](const Gradients& out) { shift_last(out.dv, 0.2); }},
      {.name = "dmask off",
       .found_as = "backward: dmask[",
       .after_backward = [](const Gradients& out) { shift_last(out.dmask, 0.2); }},
      {.name = "dsinks off",
       .found_as = "backward: dsinks[",
       .after_backward = [](const Gradients& out) { shift_last(out.dsinks, 0.2); }},
      {.name = "dlogit_scale off",
       .found_as = "backward: dlogit_scale[",
       .after_backward = [](const Gradients& out) { shift_last(out.dlogit_scale, 0.2); }},
      {.name = "dk not written",
       .found_as = "dk: not all",
       .after_backward = [](const Gradients& out) { leave_last_unwritten(out.dk); }},
      {.name = "dv not repeatable",
       .found_as = "dv: another run",
       .after_backward = [](const Gradients& out) { bytes_of(out.dv)[0] ^= std::byte{++runs % 2 == 1}; }},
  };
}

void set_elements(const Tensor& tensor, const std::vector<double>& values) {
  if (!tensor.given()) return;
  for (std::size_t n = 0; n < values.size(); ++n) {
    std::int64_t offset = 0;
    auto rest = static_cast<std::int64_t>(n);
    for (auto dim = static_cast<std::size_t>(tensor.rank); dim-- > 0;) {
      offset += rest % tensor.shape[dim] * tensor.strides[dim];
      rest /= tensor.shape[dim];
    }
    store_element(bytes_of(tensor), tensor.dtype, offset, values[n]);
  }
}

// A kernel whose errors are `factor` times those of a path.
Subject amplified(const RandomProblem& problem, double factor, Results (*path)(const OpenProblem&)) {
  const OpenProblem open(problem);
  const Results exact = formula(open);
  Results results = path(open);
  for (const auto member : Results::members) {
    for (std::size_t n = 0; n < (exact.*member).size(); ++n) {
      double& value = (results.*member)[n];
      const double truth = (exact.*member)[n];
      if (std::isfinite(truth)) value = truth + factor * (value - truth);
    }
  }
  return {.kernel = "reference",
          .forward =
              [results](const AttentionInputs&, const AttentionOptions&, const AttentionOutputs& outputs,
                        const Context&) {
                set_elements(outputs.o, results.o);
                set_elements(outputs.lse, results.lse);
              },
          .backward =
              [results](const AttentionInputs&, const AttentionOptions&, const AttentionGradients& gradients,
                        const Context&) {
                set_elements(gradients.dq, results.dq);
                set_elements(gradients.dk, results.dk);
                set_elements(gradients.dv, results.dv);
                set_elements(gradients.dmask, results.dmask);
                set_elements(gradients.dsinks, results.dsinks);
                set_elements(gradients.dlogit_scale, results.dlogit_scale);
              }};
}

bool finds_workspace_overrun(std::ptrdiff_t where) {
  try {
    with_workspace(
        10, [&](Workspace workspace) { static_cast<std::byte*>(workspace.data)[where] = std::byte{0}; });
  } catch (const GuardError&) {
    return true;
  }
  return false;
}

}  // namespace

bool self_test() {
  int missed = 0;
  const auto expect = [&](bool holds, const std::string& what) {
    if (holds) return;
    ++missed;
    std::cout << "self-test: " << what << '\n';
  };
  const auto contains = [](const std::vector<std::string>& failures, const std::string& text) {
    return std::any_of(failures.begin(), failures.end(),
                       [&](const std::string& failure) { return failure.find(text) != std::string::npos; });
  };
  const std::vector<Fault> all = faults();
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::string type = std::string(to_string(dtype)) + ": ";
    for (const Fault& fault : all) {
      const RandomProblem problem = plain_problem(dtype);  // a new one, since a fault may write to it
      const Checker checker(problem, 2);
      expect(checker.reference_failures().empty(), type + "the reference disagrees with the formula");
      if (&fault == all.data()) expect(checker.check({.kernel = "reference"}).empty(), type + "false alarm");
      expect(contains(checker.check(subject_of(fault)), fault.found_as), type + "not found: " + fault.name);
    }
  }
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::string type = std::string(to_string(dtype)) + ": ";
    RandomProblem problem = plain_problem(dtype, 29, 31);
    problem.logit_scale = {};  // a large factor of one head would make the errors of draws differ
    problem.asked.dlogit_scale = false;
    const Checker strict(problem, 2, Rule::strict);
    const Checker standard(problem, 2, Rule::standard);
    const auto expect_found = [&](const std::vector<std::string>& found, const std::string& what,
                                  std::initializer_list<const char*> names) {
      for (const char* name : names) expect(contains(found, name), type + "not found: " + what + ", " + name);
    };
    const auto all_results = {"forward: o", "backward: dq", "backward: dk", "backward: dv"};
    expect_found(strict.check(amplified(problem, 2.5, math_path)), "2.5 times the math path's error",
                 all_results);
    // Errors of 16-bit products differ more from draw to draw.
    expect_found(standard.check(amplified(problem, 3, half_path)), "3 times that of 16-bit products",
                 all_results);
    if (dtype == DType::f32) {
      // Only for f32, since in 16-bit types these results would be rounded a second time.
      expect(strict.check(amplified(problem, 1.5, math_path)).empty(), type + "false alarm at 1.5");
    } else {
      expect(standard.check(amplified(problem, 1, half_path)).empty(), type + "16-bit products refused");
      // o and dv are rounded to f16 themselves, which hides the error of rounding P.
      expect_found(strict.check(amplified(problem, 1, half_path)), "16-bit products, by the strict rule",
                   {"backward: dq", "backward: dk"});
    }
  }
  expect(finds_workspace_overrun(-1), "not found: written before the workspace");
  expect(finds_workspace_overrun(10), "not found: written past the workspace");
  if (missed == 0) std::cout << "self-test: " << all.size() + 8 << " deliberate faults found" << std::endl;
  return missed == 0;
}

}  // namespace tilewise::test
