#include <algorithm>

#include "attention/kernel.h"
#include "core/reasons.h"
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
  if (problem.batch_invariant && problem.dtype == DType::f16) {
    return "backward scales dS in f16 by the largest dO of the whole batch, so it is not batch_invariant";
  }
  return unsuited_shared_memory(problem.device, mma::backward_shared_bytes(problem));
}

// Why the f32 backward kernel cannot take a problem; empty where it can.
std::string supports_f32_backward(const AttentionProblem& problem) {
  if (problem.length_q < mma_f32::few_backward_queries) {
    return "f32 backward " +
           needs("at least " + std::to_string(mma_f32::few_backward_queries) + " queries", problem.length_q);
  }
  if (problem.features.sinks) return "f32 backward does not support sinks";
  if (problem.backward.deterministic) return "f32 backward is not deterministic";
  if (!problem.backward.aligned_rows || problem.dim_qk % 4 != 0 || problem.dim_v % 4 != 0) {
    return "f32 backward needs head dims in multiples of 4 and rows that start at multiples of 16 bytes";
  }
  if (problem.backward.repeated_keys) return "backward does not support keys or values that repeat one row";
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (mma_f32::backward_dim(dim) == 0) {
    return "f32 backward " + supports_up_to("head dims", mma_f32::most_backward_dim(), dim);
  }
  return unsuited_shared_memory(problem.device, mma_f32::backward_shared_bytes(dim));
}

// GPUs of capability 8.6 and 8.9 have shared memory for head dims up to 128.
std::string supports_f32_forward(const AttentionProblem& problem) {
  return unsuited_shared_memory(problem.device,
                                mma_f32::forward_shared_bytes(std::max(problem.dim_qk, problem.dim_v)));
}

std::string supports_f32(const AttentionProblem& problem) {
  if (const std::string reason = mma_f32::unsuited(problem); !reason.empty()) return reason;
  return problem.pass == Pass::backward ? supports_f32_backward(problem) : supports_f32_forward(problem);
}

std::string supports(const AttentionProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  if (problem.batch_invariant && problem.dtype == DType::f32) return mma_f32::depends_on_batch;
  const std::string piece =
      problem.dtype == DType::f32 ? unsuited_piece(problem) : unsuited_16_bit_piece(problem);
  if (!piece.empty()) return piece;
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (dim > mma::most_dim) return supports_up_to("head dims", mma::most_dim, dim);
  // Positions fit into 32 bits, also those in a tile past the end.
  constexpr std::int64_t most_length = 0x7fffffff - 256;
  const std::int64_t length = std::max(problem.length_q, problem.length_k);
  if (length > most_length) return supports_up_to("sequence lengths", most_length, length);
  return reason_against_device(problem.device, [&](const DeviceProperties& device) -> std::string {
    if (device.compute_capability < 80) return "needs compute capability 8.0 or higher";
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
    return "fused is faster for backward of small gradients and at most " + std::to_string(few_pairs) +
           " query-key pairs per head";
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
