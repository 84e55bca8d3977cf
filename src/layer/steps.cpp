#include "ffn/steps.h"
#include "core/kernel_list.h"
#include "layer/visitors.h"

namespace tilewise {
namespace {

// f64 runs on the CPU's reference kernels only, where a simple loop is enough.
double& element(const Matrix& x, std::int64_t m, std::int64_t n) {
  return *reinterpret_cast<double*>(x.at(m, n));
}

}  // namespace

void launch_step(const RowSum& step, const Context& context) {
  const Matrix& x = step.x;
  if (x.dtype != DType::f64) {
    const Context aligned = with_aligned_workspace(context, step_workspace(step, context));
    return ffn_steps(context.device.type)->sum_rows(x, step.sums, aligned);
  }
  for (std::int64_t n = 0; n < x.columns; ++n) {
    double sum = 0;
    for (std::int64_t m = 0; m < x.rows; ++m) sum += element(x, m, n);
    std::byte* to =
        step.sums.data + n * step.sums.stride * static_cast<std::int64_t>(size_of(step.sums.dtype));
    if (step.sums.dtype == DType::f64) {
      *reinterpret_cast<double*>(to) = sum;
    } else {
      *reinterpret_cast<float*>(to) = static_cast<float>(sum);
    }
  }
}

std::size_t step_workspace(const RowSum& step, const Context& context) {
  if (step.x.dtype == DType::f64) return 0;
  return ffn_steps(context.device.type)->sum_rows_workspace(step.x, context) + workspace_alignment - 1;
}

void launch_step(const Addition& step, const Context& context) {
  const Matrix& x = step.x;
  if (x.dtype != DType::f64) return ffn_steps(context.device.type)->add(x, step.to, context);
  for (std::int64_t m = 0; m < x.rows; ++m) {
    for (std::int64_t n = 0; n < x.columns; ++n) element(step.to, m, n) += element(x, m, n);
  }
}

}  // namespace tilewise
