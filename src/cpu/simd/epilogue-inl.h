// The epilogue of a product: bias, activation, gate, residual and conversion to the output type.

#if defined(TILEWISE_CPU_SIMD_EPILOGUE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_EPILOGUE_INL_H
#undef TILEWISE_CPU_SIMD_EPILOGUE_INL_H
#else
#define TILEWISE_CPU_SIMD_EPILOGUE_INL_H
#endif

#include "core/load.h"
#include "cpu/simd/activation-inl.h"
#include "gemm/call.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

constexpr int padded_count(std::int64_t count) {
  return static_cast<int>((count + lanes - 1) / lanes * lanes);
}

/// Columns [first, first + count) of out, with the buffers that their rows share.
struct EpilogueColumns {
  std::int64_t first;
  int count;
  float* bias;       // [padded count]; 0 without a bias
  float* gate_bias;  // likewise
  float* addend;     // [padded count]: a row of the residual, then of the former content of out
};

inline void load_bias(float* to, const Vector& bias, std::int64_t first, int count) {
  std::fill_n(to, padded_count(count), 0.0f);
  if (bias.data == nullptr) return;
  for (int n = 0; n < count; ++n) {  // scalar: it runs once per tile
    to[n] = static_cast<float>(load_element(bias.data, bias.dtype, (first + n) * bias.stride));
  }
}

inline void load_biases(const GemmCall& call, const EpilogueColumns& columns) {
  load_bias(columns.bias, call.bias, columns.first, columns.count);
  if (call.problem.gated) load_bias(columns.gate_bias, call.gate_bias, columns.first, columns.count);
}

/// Applies the epilogue to a row of accumulators in place and stores it. `sums` and `gate` hold whole
/// vectors.
inline void finish_row(const GemmCall& call, const EpilogueColumns& columns, std::int64_t m, float* sums,
                       const float* gate) {
  const GemmProblem& problem = call.problem;
  const int count = columns.count;
  with_activation(problem.activation, [&](auto tag) HWY_ATTR {
    constexpr Activation activation = decltype(tag)::activation;
    for (int n = 0; n < count; n += lanes) {
      VF value = hn::Add(load(sums + n), load(columns.bias + n));
      if (problem.gated) {
        const VF activated_gate = activate<activation>(hn::Add(load(gate + n), load(columns.gate_bias + n)));
        value = hn::Mul(value, activated_gate);
      } else {
        value = activate<activation>(value);
      }
      store(value, sums + n);
    }
  });
  const auto add = [&](const Matrix& matrix) HWY_ATTR {
    widen(columns.addend, matrix.at(m, columns.first), matrix.dtype, count, 1.0f);
    for (int n = 0; n < count; n += lanes) store(hn::Add(load(sums + n), load(columns.addend + n)), sums + n);
  };
  if (problem.residual) add(call.residual);
  if (problem.accumulate) add(call.out);
  narrow(call.out.at(m, columns.first), call.out.dtype, sums, count);
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
