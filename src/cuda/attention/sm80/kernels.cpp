#include <algorithm>

#include "attention/kernel.h"
#include "cuda/attention/common/backward/ordered_starts.h"
#include "cuda/attention/common/f32/limits.h"
#include "cuda/attention/common/pieces.h"
#include "cuda/attention/sm80/backward/backward.h"
#include "cuda/attention/sm80/backward_f32/backward.h"
#include "cuda/attention/sm80/backward_f32/tuning.h"
#include "cuda/attention/sm80/forward/forward.h"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/attention/sm80/forward_f32/forward.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

std::string supports_backward(const AttentionProblem& problem) {
  if (const std::string reason = mma::unsuited_backward(problem); !reason.empty()) return reason;
  const std::size_t needed = mma::backward_shared_bytes(problem);
  if (device_properties(problem.device.index).shared_bytes < needed) {
    return "backward needs " + std::to_string(needed) + " bytes of shared memory a block";
  }
  return {};
}

// Why the f32 backward kernel cannot take a problem; empty where it can.
std::string supports_f32_backward(const AttentionProblem& problem) {
  if (problem.length_q < mma_f32::few_backward_queries) {
    return "f32 backward takes " + std::to_string(mma_f32::few_backward_queries) + " queries or more";
  }
  if (problem.features.sinks) return "f32 backward takes causal, window and lengths alone, no other feature";
  if (problem.backward.deterministic) return "f32 backward is not deterministic";
  if (!problem.backward.aligned_rows || problem.dim_qk % 4 != 0 || problem.dim_v % 4 != 0) {
    return "f32 backward takes rows aligned to 16 bytes, of head dims that are multiples of 4";
  }
  if (problem.backward.repeated_keys) return "backward takes no keys or values that are one row repeated";
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (mma_f32::backward_dim(dim) == 0) {
    return "f32 backward takes head dims to " + std::to_string(mma_f32::most_backward_dim());
  }
  const std::size_t needed = mma_f32::backward_shared_bytes(dim);
  if (device_properties(problem.device.index).shared_bytes < needed) {
    return "f32 backward needs " + std::to_string(needed) + " bytes of shared memory a block";
  }
  return {};
}

// GPUs of capability 8.6 and 8.9 have shared memory for head dims up to 128.
std::string supports_f32_forward(const AttentionProblem& problem) {
  const std::size_t needed = mma_f32::forward_shared_bytes(std::max(problem.dim_qk, problem.dim_v));
  if (device_properties(problem.device.index).shared_bytes < needed) {
    return "f32 forward needs " + std::to_string(needed) + " bytes of shared memory a block";
  }
  return {};
}

std::string supports_f32(const AttentionProblem& problem) {
  if (const std::string reason = mma_f32::unsuited(problem); !reason.empty()) return reason;
  return problem.pass == Pass::backward ? supports_f32_backward(problem) : supports_f32_forward(problem);
}

std::string supports(const AttentionProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "takes f32, f16 and bf16, not f64";
  const std::string piece =
      problem.dtype == DType::f32 ? unsuited_piece(problem) : unsuited_16_bit_piece(problem);
  if (!piece.empty()) return piece;
  if (problem.dim_qk > mma::most_dim || problem.dim_v > mma::most_dim) {
    return "takes head dims to " + std::to_string(mma::most_dim);
  }
  // Positions fit into 32 bits, also those in a tile past the end.
  constexpr std::int64_t most_length = 0x7fffffff - 256;
  if (problem.length_q > most_length || problem.length_k > most_length) {
    return "takes sequences to 2^31 - 257";
  }
  return reason_against_device(problem.device, [&](const DeviceProperties& device) -> std::string {
    if (device.compute_capability < 80) return "needs compute capability 8.0";
    if (problem.dtype == DType::f32) return supports_f32(problem);
    return problem.pass == Pass::backward ? supports_backward(problem) : "";
  });
}

Configuration configure(const AttentionCall& call, const Context& context) {
  const bool f32 = call.problem.dtype == DType::f32;
  if (call.problem.pass == Pass::forward) {
    return (f32 ? mma_f32::configure_forward : mma::configure_forward)(call, context);
  }
  Configuration found = (f32 ? mma_f32::configure_backward : mma::configure_backward)(call, context);
  found.workspace_bytes += simt::ordered_starts_bytes(call);
  return found;
}

void launch_on_device(const AttentionCall& call, const Configuration& configuration, const Context& context) {
  const DeviceGuard guard(context.device.index);
  const bool f32 = call.problem.dtype == DType::f32;
  if (call.problem.pass == Pass::forward) {
    return f32 ? mma_f32::forward(call, configuration.row, context)
               : mma::forward(call, configuration, context);
  }
  Context remaining = context;
  const AttentionCall ordered = simt::with_ordered_starts(call, remaining);
  (f32 ? mma_f32::backward : mma::backward)(ordered, configuration.row, remaining);
}

// Backward launches three kernels, each of which takes microseconds: too much for few gradients and few pairs
// of query and key.
std::string yields(const AttentionProblem& problem) {
  if (problem.dtype == DType::f32) return mma_f32::too_few_pairs(problem);
  constexpr std::int64_t few_pairs = 64 * 64;
  if (problem.pass == Pass::backward && mma::few_gradients(problem) &&
      problem.length_q * problem.length_k <= few_pairs) {
    return "leaves backward of few results and " + std::to_string(few_pairs) + " pairs a head to fused";
  }
  return {};
}

}  // namespace

constinit const AttentionKernel mma_attention = {.name = "mma",
                                                 .supports = supports,
                                                 .yields = yields,
                                                 .configure = configure,
                                                 .launch_configured = launch_on_device};

}  // namespace tilewise::cuda
