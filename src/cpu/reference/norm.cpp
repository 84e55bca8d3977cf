#include <cmath>

#include "core/load.h"
#include "core/parallel.h"
#include "cpu/reference/elements.h"
#include "norm/kernel.h"

namespace tilewise::cpu {
namespace {

// x + residual, rounded to the type in which it is stored.
double normalised_input(const NormCall& call, std::int64_t m, std::int64_t d) {
  double value = element(call.x, m, d);
  if (!call.problem.residual) return value;
  std::byte rounded[sizeof(double)] = {};
  store_element(rounded, call.x.dtype, 0, value + element(call.residual, m, d));
  return load_element(rounded, call.x.dtype, 0);
}

void forward_row(const NormCall& call, std::int64_t m) {
  const std::int64_t dim = call.problem.dim;
  const auto count = static_cast<double>(dim);
  double mean = 0;
  if (call.problem.norm == Norm::layer) {
    for (std::int64_t d = 0; d < dim; ++d) mean += normalised_input(call, m, d);
    mean /= count;
  }
  double squares = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    const double distance = normalised_input(call, m, d) - mean;
    squares += distance * distance;
  }
  const double rstd = 1 / std::sqrt(squares / count + call.epsilon);
  store(call.mean, m, mean);
  store(call.rstd, m, rstd);
  for (std::int64_t d = 0; d < dim; ++d) {
    const double sum = normalised_input(call, m, d);
    const double y = (sum - mean) * rstd * element(call.weight, d, 1) + element(call.bias, d, 0);
    // The sum may share its memory with x or the residual, so it is written after they were read.
    store(call.y, m, d, y);
    if (call.sum.data != nullptr) {
      store(call.sum, m, d, sum);
    }
  }
}

// With n = (x − mean)·rstd and g = dy·weight: dx = rstd·(g − mean(g) − n·mean(g·n)), without mean(g) in an
// rms norm.
void backward_row(const NormCall& call, std::int64_t m) {
  const std::int64_t dim = call.problem.dim;
  const auto count = static_cast<double>(dim);
  const double mean = element(call.mean, m, 0);
  const double rstd = element(call.rstd, m, 0);
  double sum = 0, product = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    const double g = element(call.dy, m, d) * element(call.weight, d, 1);
    sum += g;
    product += g * (element(call.x, m, d) - mean) * rstd;
  }
  if (call.problem.norm == Norm::rms) sum = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    const double g = element(call.dy, m, d) * element(call.weight, d, 1);
    const double n = (element(call.x, m, d) - mean) * rstd;
    double dx = rstd * (g - sum / count - n * product / count);
    if (call.d_sum.data != nullptr) dx += element(call.d_sum, m, d);
    store(call.dx, m, d, dx);
  }
}

void weight_gradients(const NormCall& call, std::int64_t d) {
  double weight = 0, bias = 0;
  for (std::int64_t m = 0; m < call.problem.rows; ++m) {
    const double dy = element(call.dy, m, d);
    weight += dy * (element(call.x, m, d) - element(call.mean, m, 0)) * element(call.rstd, m, 0);
    bias += dy;
  }
  store(call.d_weight, d, weight);
  store(call.d_bias, d, bias);
}

std::string supports(const NormProblem& problem) {
  return problem.device.type == Device::Type::cpu ? "" : "runs on the CPU only";
}

std::size_t workspace(const NormCall&, const Context&) { return 0; }

void launch(const NormCall& call, const Context& context) {
  const NormProblem& problem = call.problem;
  if (problem.pass == Pass::forward) {
    for_each_task(context.parallel_for, problem.rows,
                  [&](std::int64_t, std::int64_t m) { forward_row(call, m); });
    return;
  }
  if (problem.weight_gradient) {  // before dx, which may share the memory of dy
    for_each_task(context.parallel_for, problem.dim,
                  [&](std::int64_t, std::int64_t d) { weight_gradients(call, d); });
  }
  if (call.dx.data != nullptr) {
    for_each_task(context.parallel_for, problem.rows,
                  [&](std::int64_t, std::int64_t m) { backward_row(call, m); });
  }
}

}  // namespace

constinit const NormKernel reference_norm = {
    .name = "reference", .supports = supports, .workspace = workspace, .launch = launch};

}  // namespace tilewise::cpu
