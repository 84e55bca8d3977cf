#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "attention/kernel.h"
#include "core/reasons.h"
#include "cuda/attention/common/backward/backward.h"
#include "cuda/attention/common/backward/ordered_starts.h"
#include "cuda/attention/common/f32/limits.h"
#include "cuda/attention/common/forward/few_results.h"
#include "cuda/attention/common/pieces.h"
#include "cuda/attention/sm90/backward/backward.h"
#include "cuda/attention/sm90/forward/choice.h"
#include "cuda/attention/sm90/forward/forward.h"
#include "cuda/attention/sm90/forward/halves.h"
#include "cuda/attention/sm90/forward_f32/forward.h"
#include "cuda/attention/sm90/forward_f32/tuning.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

std::string unsuited_blocks(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  if (problem.piece.wide_rows) return "needs o in the type of q with a block mask, got f32";
  if (features.mask != MaskKind::none) {
    return problem.key_blocks ? "" : "supports only padding as a block mask together with a mask";
  }
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (features.dropout && dim > wgmma::most_dim_with_blocks_and_dropout) {
    return supports_up_to("head dims", wgmma::most_dim_with_blocks_and_dropout, dim,
                          " with a block mask and dropout");
  }
  const auto suits = [](std::int64_t block, std::int64_t all) {
    return block % wgmma::block_multiple == 0 || block >= all;
  };
  if (!suits(problem.block_q, problem.length_q) || !suits(problem.block_k, problem.length_k)) {
    const std::string multiple = std::to_string(wgmma::block_multiple);
    return "needs mask blocks in multiples of " + multiple +
           " queries and keys, or of the whole length, got " + std::to_string(problem.block_q) + " x " +
           std::to_string(problem.block_k);
  }
  if (!problem.aligned_tiles) {
    return "needs contiguous rows of block-mask tiles that start at multiples of 16 bytes";
  }
  return {};
}

std::string missing_feature(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  if (problem.layout == Layout::paged) return "does not support paged keys";
  if (features.block_mask) {
    if (const std::string reason = unsuited_blocks(problem); !reason.empty()) return reason;
  }
  const bool masked = features.mask != MaskKind::none || features.dropout;
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (problem.piece.wide_rows) {
    if (masked) return "needs o in the type of q with a mask or dropout, got f32";
    if (dim > wgmma::most_dim_of_decode) {
      return supports_up_to("head dims", wgmma::most_dim_of_decode, dim, " with o in f32");
    }
  }
  if (features.softcap && dim > wgmma::most_dim_with_softcap) {
    return supports_up_to("head dims", wgmma::most_dim_with_softcap, dim, " with softcap");
  }
  return {};
}

// The reason why results would not be exact enough for strict precision; empty if they are.
std::string too_inexact(const AttentionProblem& problem) {
  const std::int64_t rows = problem.heads_q * problem.queries;
  if (mma::few_results(rows, problem.dim_v)) {
    return "rounds P to 16 bits, too inexact in strict precision for " + std::to_string(rows) + " rows of " +
           std::to_string(problem.dim_v) + " results";
  }
  // Tensor cores truncate sums, and the kernel corrects that only on average. In 9 of 2,876 random problems,
  // all of 256 dims and 99 to 544 rows, the error of LSE was above twice that of the math path.
  constexpr std::int64_t few_rows = 1024;
  if (std::max(problem.dim_qk, problem.dim_v) > 128 && rows < few_rows) {
    return needs("at least " + std::to_string(few_rows) +
                     " query rows in total for head dims above 128 in strict precision",
                 rows);
  }
  // The same happened in 7 of 3,577 problems with more rows, also of 256 dims, and few keys: at most 94,000
  // pairs, and 240,000 in a test. The pairs that a block mask leaves are not counted: assume one block per
  // query.
  constexpr std::int64_t few_pairs = std::int64_t{1} << 20;
  const std::int64_t keys = problem.features.block_mask
                                ? std::min<std::int64_t>(problem.most_keys, wgmma::block_multiple)
                                : std::max<std::int64_t>(problem.most_keys, 1);
  if (problem.dim_qk > 192 && rows < few_pairs / keys) {
    return "needs at least 2^20 query-key pairs for head dims above 192 in strict precision";
  }
  return {};
}

std::string unsuited_shape(const AttentionProblem& problem) {
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (dim > wgmma::most_dim) return supports_up_to("head dims", wgmma::most_dim, dim);
  const std::int64_t length = std::max(problem.length_q, problem.length_k);
  if (length >= wgmma::BandOfKeys::most) {
    return supports_up_to("sequence lengths", wgmma::BandOfKeys::most - 1, length);
  }
  if (problem.length_k == 0) return "needs at least one key";
  const std::int64_t queries = choice_length_q(problem);
  const std::int64_t packed_rows = queries * wgmma::packed_heads(problem);
  if (queries <= wgmma::few_queries && packed_rows < wgmma::few_rows) {
    return "needs more than " + std::to_string(wgmma::few_queries) + " queries, or " +
           std::to_string(wgmma::few_rows) + " rows with packed GQA, got " + std::to_string(queries) +
           " and " + std::to_string(packed_rows);
  }
  if (problem.queries > 0x7fffffff ||
      problem.heads_q * (problem.queries / 64 + problem.batch + 1) > 0x7fffffff) {
    return "supports fewer than 2^31 queries and query tiles";
  }
  if (problem.strict) {
    if (const std::string reason = too_inexact(problem); !reason.empty()) return reason;
  }
  if (!problem.aligned) {
    return "needs rows of q, k and v that start at multiples of 16 bytes, without negative strides";
  }
  if (!problem.mask_in_rows) return "needs a mask whose last dimension is contiguous or broadcast";
  if (!problem.usual_scale) return "needs a scale of at least 1e-20";
  return {};
}

std::string unsuited_f32(const AttentionProblem& problem) {
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (dim > wgmma_f32::most_dim) return supports_up_to("head dims", wgmma_f32::most_dim, dim, " in f32");
  constexpr std::int64_t most_length = 0x7fffffff - 256;  // positions, tiles past the end too, fit 32 bits
  const std::int64_t length = std::max(problem.length_q, problem.length_k);
  if (length > most_length) return supports_up_to("sequence lengths", most_length, length);
  return mma_f32::unsuited(problem);
}

std::string unsuited_backward(const AttentionProblem& problem) {
  if (problem.dtype == DType::f32) return "has no backward for f32";
  if (const std::string reason = wgmma_backward::unsuited(problem); !reason.empty()) return reason;
  return mma::unsuited_backward(problem);
}

std::string unsuited_capability(const AttentionProblem& problem) {
  try {
    if (device_properties(problem.device.index).compute_capability != 90) {
      return "needs compute capability 9.0 (Hopper)";
    }
  } catch (const DeviceError& error) {
    return error.what();
  }
  return {};
}

std::string supports(const AttentionProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  if (problem.batch_invariant) {
    if (problem.dtype == DType::f32) return mma_f32::depends_on_batch;
    if (problem.strict) return "is strict only with enough rows, so its choice would depend on the batch";
  }
  const std::string piece =
      problem.dtype == DType::f32 ? unsuited_piece(problem) : unsuited_16_bit_piece(problem);
  if (!piece.empty()) return piece;
#ifndef TILEWISE_HAS_WGMMA
  return "this build has no code for sm_90a";
#endif
  if (problem.pass == Pass::backward) {
    if (const std::string reason = unsuited_backward(problem); !reason.empty()) return reason;
  } else if (problem.heads_q * problem.queries == 0) {
    return "needs at least one query";  // an empty tensor has no map
  } else if (problem.dtype == DType::f32) {
    if (const std::string reason = unsuited_f32(problem); !reason.empty()) return reason;
  } else {
    if (const std::string reason = missing_feature(problem); !reason.empty()) return reason;
    if (const std::string reason = unsuited_shape(problem); !reason.empty()) return reason;
  }
  return unsuited_capability(problem);
}

// The workspace has a word for the tile counter, if tiles are scheduled dynamically, and the partial results
// of splits.
Configuration configure(const AttentionCall& call, const Context& context) {
#ifdef TILEWISE_HAS_WGMMA
  if (call.problem.pass == Pass::backward) {
    return {.workspace_bytes = simt::ordered_starts_bytes(call) + wgmma_backward::backward_workspace(call)};
  }
  if (call.problem.dtype == DType::f32) return wgmma_f32::configure_forward(call);
#endif
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const wgmma::Choice choice = wgmma::choose(call, multiprocessors);
  if (choice.decode.splits > 0) {
    return {.workspace_bytes = wgmma::SplitSpace::of(call, choice.decode).bytes(),
            .row = choice.row,
            .heads_log2 = choice.decode.heads_log2,
            .splits = choice.decode.splits};
  }
  const wgmma::ForwardConfig& c = wgmma::listed_with_more(call) ? wgmma::GeneralBlockForward::rows[choice.row]
                                  : wgmma::listed(call)         ? wgmma::BlockForward::rows[choice.row]
                                  : wgmma::combined(call.problem) ? wgmma::CombinedForward::rows[choice.row]
                                  : wgmma::masked(call)           ? wgmma::MaskedForward::rows[choice.row]
                                  : wgmma::general(call)          ? wgmma::GeneralForward::rows[choice.row]
                                                                  : wgmma::Forward::rows[choice.row];
  const bool counted = wgmma::schedule_of(call, c, multiprocessors).counted();
  return {.workspace_bytes = counted ? sizeof(std::uint64_t) : 0, .row = choice.row};
}

#ifdef TILEWISE_HAS_WGMMA
template <typename T>
void launch_as(const AttentionCall& call, const Configuration& configuration, const Context& context) {
  const int row = configuration.row;
  if (configuration.splits > 0) {
    const wgmma::DecodePlan decode{configuration.heads_log2, configuration.splits};
    return wgmma::decode_forward_of<T>(call, context, row, decode);
  }
  if (wgmma::listed_with_more(call)) return wgmma::general_block_forward_of<T>(call, context, row);
  if (wgmma::listed(call)) return wgmma::block_forward_of<T>(call, context, row);
  if (wgmma::combined(call.problem)) return wgmma::combined_forward_of<T>(call, context, row);
  if (wgmma::masked(call)) return wgmma::masked_forward_of<T>(call, context, row);
  wgmma::general(call) ? wgmma::general_forward_of<T>(call, context, row)
                       : wgmma::forward_of<T>(call, context, row);
}
#endif

#ifdef TILEWISE_HAS_WGMMA
using RunBackward = void(const AttentionCall&, const Context&);
void launch_backward(const AttentionCall& call, const Context& context, RunBackward& run) {
  const DeviceGuard guard(context.device.index);
  Context rest = context;
  const AttentionCall ordered = simt::with_ordered_starts(call, rest);
  run(ordered, rest);
}
#endif

void launch_on_device(const AttentionCall& call, const Configuration& configuration, const Context& context) {
#ifdef TILEWISE_HAS_WGMMA
  if (call.problem.pass == Pass::backward) {
    return launch_backward(call, context, wgmma_backward::backward);
  }
  const DeviceGuard guard(context.device.index);
  if (call.problem.dtype == DType::f32) return wgmma_f32::forward(call, configuration.row, context);
  call.problem.dtype == DType::f16 ? launch_as<__half>(call, configuration, context)
                                   : launch_as<__nv_bfloat16>(call, configuration, context);
#else
  static_cast<void>(call);
  static_cast<void>(configuration);
  static_cast<void>(context);
#endif
}

// With a mask or dropout, a CTA walks over all keys of its queries, where mma has split-KV for small grids.
// docs/wgmma.md says from which sizes on that takes longer.
std::string yields_masked(const AttentionProblem& problem) {
  const std::int64_t rows = problem.heads_q * problem.queries;
  const int multiprocessors = device_properties(problem.device.index).multiprocessors;
  if (problem.features.dropout && rows < 64 * multiprocessors) {
    return "mma is faster for dropout with so few query rows (" + std::to_string(rows) +
           "): it splits the keys";
  }
  if (problem.features.mask != MaskKind::none && rows <= 16 * multiprocessors && problem.length_k >= 2048) {
    return "mma is faster for masks with so few query rows (" + std::to_string(rows) + ") and " +
           std::to_string(problem.length_k) + " keys: it splits the keys";
  }
  return {};
}

// A CTA of the f32 forward has 64 queries, and two CTAs share an SM.
std::string yields(const AttentionProblem& problem) {
  if (problem.pass == Pass::backward) return {};
  if (problem.dtype != DType::f32) return yields_masked(problem);
  constexpr std::int64_t rows = 64;
  const std::int64_t blocks = problem.heads_q * (problem.queries + rows - 1) / rows;
  if (4 * blocks < 3 * device_properties(problem.device.index).multiprocessors) {
    return "mma is faster for f32 with so few queries (" + std::to_string(blocks) +
           " query tiles): its tiles are smaller";
  }
  return mma_f32::too_few_pairs(problem);
}

std::string supports_halves(const AttentionProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.batch_invariant) return "does not support batch_invariant";
#ifdef TILEWISE_HAS_WGMMA
  if (const std::string reason = wgmma_halves::unsuited(problem); !reason.empty()) return reason;
  return unsuited_capability(problem);
#else
  return "this build has no code for sm_90a";
#endif
}

// A CTA has 64 queries of a head and walks over all of its keys.
std::string yields_halves(const AttentionProblem& problem) {
  constexpr std::int64_t few = 16;
  if (problem.length_q > few) return {};
  return "a later kernel may split the keys of so few queries (" + std::to_string(problem.length_q) + ")";
}
std::size_t halves_workspace(const AttentionCall&, const Context&) { return 0; }
void launch_halves(const AttentionCall& call, const Context& context) {
#ifdef TILEWISE_HAS_WGMMA
  const DeviceGuard guard(context.device.index);
  wgmma_halves::forward(call, context);
#else
  static_cast<void>(call);
  static_cast<void>(context);
#endif
}

}  // namespace

constinit const AttentionKernel wgmma_halves_attention = {.name = "wgmma_halves",
                                                          .supports = supports_halves,
                                                          .workspace = halves_workspace,
                                                          .launch = launch_halves,
                                                          .yields = yields_halves};

constinit const AttentionKernel wgmma_attention = {.name = "wgmma",
                                                   .supports = supports,
                                                   .yields = yields,
                                                   .configure = configure,
                                                   .launch_configured = launch_on_device};

}  // namespace tilewise::cuda
