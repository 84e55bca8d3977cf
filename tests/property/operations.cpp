#include "property/operations.h"

#include <gtest/gtest-spi.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>

#include "layer/ffn_case.h"
#include "layer/gemm_case.h"
#include "layer/layer_case.h"
#include "layer/norm_case.h"
#include "layer/rope_case.h"
#include "support/device.h"

namespace tilewise::test {
namespace {

// Runs `body` and returns its failed GoogleTest expectations, which then do not fail a test.
std::vector<std::string> failures_in(const std::function<void()>& body) {
  std::vector<std::string> failures;
  testing::TestPartResultArray found;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &found);
    try {
      body();
    } catch (const std::exception& error) {
      failures.push_back(std::string("threw ") + error.what());
    }
  }
  for (int n = 0; n < found.size(); ++n) {
    if (found.GetTestPartResult(n).failed()) failures.push_back(found.GetTestPartResult(n).message());
  }
  return failures;
}

// A log-uniform extent, so that small ones are as likely as large ones.
std::int64_t extent(Random& random, double most, double least = 1) {
  return static_cast<std::int64_t>(random.log_uniform(least, most));
}

DType any_dtype(Random& random) { return random.pick({DType::f32, DType::f16, DType::bf16}); }

Activation any_activation(Random& random, bool gated) {
  if (!gated && random.chance(0.2)) return Activation::none;
  return random.pick({Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu});
}

template <typename... Tensors>
void set_device(Device device, Tensors&... tensors) {
  ((tensors.device = device), ...);
}

void set_device(Device device, const std::vector<Tensor*>& tensors) {
  for (Tensor* tensor : tensors) tensor->device = device;
}

// Checks one problem. It is drawn again for each kernel, since a check writes to its tensors.
class OperationChecker {
 public:
  OperationChecker(std::uint64_t seed, Device device, const std::vector<std::string>& kernels,
                   CheckedOperation& checked)
      : seed_(seed), device_(device), kernels_(kernels), checked_(checked) {}

  void run() {
    Random random(seed_);
    switch (random.between(0, 4)) {
      case 0: return gemm();
      case 1: return ffn();
      case 2: return norm();
      case 3: return rope();
      default: return layer();
    }
  }

 private:
  // A generator in the state after the choice of the operation. Every call returns the same.
  Random random() const {
    Random random(seed_);
    random.bits();
    return random;
  }

  Context context(Random& random) const {
    if (device_.type != Device::Type::cpu) return {.device = device_};
    return random_context(random);
  }

  void check(const std::string& operation, const std::string& kernel, CheckedOperation::Passes passes,
             const std::function<void()>& body) {
    const std::string name = kernel.empty() ? operation : operation + "_" + kernel;
    CheckedOperation::Passes& taken = checked_.taken[name];
    taken.forward += passes.forward;
    taken.backward += passes.backward;
    for (const std::string& failure : failures_in(body)) checked_.failures.push_back(name + ": " + failure);
  }

  // Calls body with each kernel that can compute the call in all of the explanations.
  void for_each_able(const std::vector<Explanation>& explanations,
                     const std::function<void(const std::string&)>& body) {
    checked_.problem = explanations.front().problem;
    for (const auto& entry : explanations.front().entries) {
      const bool wanted = kernels_.empty() || std::ranges::find(kernels_, entry.kernel) != kernels_.end();
      const bool able = std::ranges::all_of(explanations, [&](const Explanation& explanation) {
        return std::ranges::any_of(explanation.entries, [&](const auto& other) {
          return other.kernel == entry.kernel && other.verdict != Explanation::Verdict::unable;
        });
      });
      if (wanted && able) body(entry.kernel);
    }
  }

  void gemm() {
    using namespace gemm_case;
    const auto draw = [&](Random& random) {
      const bool gated = random.chance(0.3);
      const DType dtype = any_dtype(random);
      const Activation activation = any_activation(random, gated);
      const Sizes sizes{extent(random, 400), extent(random, 400), extent(random, 700)};
      return gemm_case::random_problem(random, sizes, dtype, activation, gated);
    };
    Random first = random();
    const Problem p = draw(first);
    checked_.dtype = p.a.dtype();
    GemmInputs in = p.inputs();
    GemmOutputs out{p.out.view()};
    set_device(device_, in.a, in.b, in.bias, in.gate, in.gate_bias, in.residual, out.out);
    for_each_able({explain_gemm(in, p.options, out, {.device = device_})}, [&](const std::string& kernel) {
      Random again = random();
      Problem problem = draw(again);
      problem.options.kernel = kernel;
      check("gemm", kernel, {.forward = 1}, [&] { gemm_case::check(problem, context(again)); });
    });
  }

  void ffn() {
    using namespace ffn_case;
    const auto draw = [&](Random& random) {
      const bool gated = random.chance(0.5);
      const DType dtype = any_dtype(random);
      const Activation activation = any_activation(random, gated);
      // The bound is twice the error of a framework's steps. In few elements that error could be small by
      // luck.
      const Sizes sizes{extent(random, 150, 16), extent(random, 150, 16), extent(random, 300, 16),
                        extent(random, 150, 16)};
      Problem p = ffn_case::random_problem(random, sizes, dtype, activation, gated);
      if (random.chance(0.5))
        p.options.max_intermediate_bytes = static_cast<std::size_t>(extent(random, 1e5));
      return p;
    };
    Random first = random();
    const Problem p = draw(first);
    checked_.dtype = p.x.dtype();
    FfnInputs in = p.inputs();
    FfnOutputs out = p.outputs();
    FfnGradients gradients = p.gradients();
    set_device(device_, ffn_case::tensors_of(in));
    set_device(device_, out.out, gradients.d_out, gradients.dx, gradients.d_up, gradients.d_gate,
               gradients.d_down, gradients.d_up_bias, gradients.d_gate_bias, gradients.d_down_bias);
    const Context where{.device = device_};
    for_each_able({explain_ffn_forward(in, p.options, out, where),
                   explain_ffn_backward(in, p.options, gradients, where)},
                  [&](const std::string& kernel) {
                    Random again = random();
                    Problem problem = draw(again);
                    problem.options.kernel = kernel;
                    const Context on = context(again);
                    check("ffn", kernel, {1, 1}, [&] {
                      if (again.chance(0.5)) return check_kept(problem, again, on);
                      ffn_case::check_forward(problem, on);
                      ffn_case::check_backward(problem, on);
                    });
                  });
  }

  void norm() {
    using namespace norm_case;
    const auto draw = [&](Random& random) {
      const Norm norm = random.pick({Norm::rms, Norm::layer});
      const DType dtype = any_dtype(random);
      const std::int64_t rows = extent(random, 300), dim = extent(random, 3000);
      return norm_case::random_problem(random, rows, dim, dtype, norm);
    };
    Random first = random();
    const Problem p = draw(first);
    checked_.dtype = p.x.dtype();
    NormInputs in = p.inputs(), sums = p.backward_inputs();
    NormOutputs out = p.outputs();
    NormGradients g = p.gradients();
    set_device(device_, in.x, in.residual, in.weight, in.bias, sums.x, sums.weight, sums.bias, out.y, out.sum,
               out.rstd, out.mean, g.dy, g.d_sum, g.rstd, g.mean, g.dx, g.d_weight, g.d_bias);
    const Context where{.device = device_};
    for_each_able(
        {explain_norm_forward(in, p.options, out, where), explain_norm_backward(sums, p.options, g, where)},
        [&](const std::string& kernel) {
          Random again = random();
          Problem problem = draw(again);
          problem.options.kernel = kernel;
          check("norm", kernel, {1, 1}, [&] { norm_case::check(problem, context(again)); });
        });
  }

  void rope() {
    using namespace rope_case;
    const auto draw = [&](Random& random) {
      const std::int64_t dim = extent(random, 260);
      const std::int64_t rotary = random.chance(0.5) ? dim / 2 * 2 : random.between(0, dim / 2) * 2;
      const Sizes sizes{
          random.between(1, 3), random.between(1, 9), random.between(1, 4), extent(random, 49), dim, rotary,
          extent(random, 260)};
      const DType dtype = any_dtype(random);
      Problem p = rope_case::random_problem(random, sizes, dtype);
      const bool paged = random.chance(0.5);
      if (random.chance(0.5)) add_cache(p, random, sizes, paged);
      return p;
    };
    Random first = random();
    const Problem p = draw(first);
    checked_.dtype = p.q.dtype();
    RopeInputs in = p.inputs();
    RopeOutputs out = p.outputs();
    set_device(device_, in.q, in.k, in.v, in.cos, in.sin, in.positions, in.cache_starts, in.page_table, out.q,
               out.k, out.k_cache, out.v_cache);
    for_each_able({explain_rope(in, p.options, out, {.device = device_})}, [&](const std::string& kernel) {
      Random again = random();
      Problem problem = draw(again);
      problem.options.kernel = kernel;
      check("rope", kernel, {.forward = 1}, [&] { rope_case::check(problem, context(again)); });
    });
  }

  void layer() {
    Random random = this->random();
    const std::vector<std::string_view> names = layer_configs();
    const std::string_view name =
        names[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(names.size()) - 1))];
    checked_.dtype = any_dtype(random);
    checked_.problem = "layer " + std::string(name) + " " + std::string(to_string(checked_.dtype));
    const Context on = context(random);
    check("layer", "", {1, 1}, [&] {
      layer_case::check_forward(random, name, checked_.dtype, on);
      layer_case::check_backward(random, name, checked_.dtype, on);
    });
  }

  std::uint64_t seed_;
  Device device_;
  const std::vector<std::string>& kernels_;
  CheckedOperation& checked_;
};

}  // namespace

CheckedOperation check_operation(std::uint64_t seed, Device device, const std::vector<std::string>& kernels) {
  device_call = call_on_cuda;
  CheckedOperation checked;
  OperationChecker(seed, device, kernels, checked).run();
  return checked;
}

std::vector<std::string> operation_kernels() {
  std::vector<std::string> names;
  for (const auto& of : {gemm_kernels(), ffn_kernels(), norm_kernels(), rope_kernels()}) {
    names.insert(names.end(), of.begin(), of.end());
  }
  return names;
}

}  // namespace tilewise::test
