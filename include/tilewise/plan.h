#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tilewise/attention.h"
#include "tilewise/context.h"
#include "tilewise/explain.h"
#include "tilewise/ffn.h"
#include "tilewise/gemm.h"
#include "tilewise/norm.h"
#include "tilewise/rope.h"

#pragma GCC visibility push(default)
namespace tilewise {

// A plan is a call whose arguments were checked and whose kernel was chosen. Planning depends on shapes,
// strides, types and alignment, and never on what the tensors hold: that is read when the plan runs. So a
// loop can plan once and run many times. attention_forward() and the other functions are plan and run.

/// A value of a few kilobytes that owns no other memory. It does not change when it runs, so threads may run
/// one plan at the same time, each with a workspace of its own.
template <typename Inputs, typename Outputs>
class Plan {
 public:
  /// The name of the kernel that was chosen.
  std::string_view kernel() const;
  /// Bytes of workspace that each run needs.
  std::size_t workspace_bytes() const;
  /// Each kernel in order of preference: chosen, able, or why not.
  Explanation explain() const;

  /// Runs the call on the tensors that the plan was made with. The context must have the planned device and
  /// SIMD level, at most the planned number of threads, and a workspace; its stream may be any.
  void run(const Context& context) const;

  /// Runs the call on other tensors. Those that were given to the plan must be given again, with the same
  /// shapes, strides and types. Where a planned address was a multiple of 2, 4, 8 or 16, the new one must be,
  /// too. Throws InvalidArgument, which names the argument, before anything is written.
  void run(const Inputs& inputs, const Outputs& outputs, const Context& context) const
    requires std::same_as<Inputs, AttentionInputs>;

 private:
  friend struct PlanAccess;  // the library's own
  struct State;
  Plan() {}
  const State& state() const;
  void check(const Context& context) const;
  void launch(const Context& context) const;

  static constexpr bool keeps_tensors = std::same_as<Inputs, AttentionInputs>;
  static constexpr std::size_t state_bytes = keeps_tensors ? sizeof(Inputs) + sizeof(Outputs) + 1728 : 1536;
  alignas(std::max_align_t) std::byte state_[state_bytes];
};

using AttentionPlan = Plan<AttentionInputs, AttentionOutputs>;
using AttentionBackwardPlan = Plan<AttentionInputs, AttentionGradients>;
using GemmPlan = Plan<GemmInputs, GemmOutputs>;
using NormPlan = Plan<NormInputs, NormOutputs>;
using NormBackwardPlan = Plan<NormInputs, NormGradients>;
using RopePlan = Plan<RopeInputs, RopeOutputs>;
using FfnPlan = Plan<FfnInputs, FfnOutputs>;
using FfnBackwardPlan = Plan<FfnInputs, FfnGradients>;

/// Whose memory results go to. A plan looks for overlaps between what is written and what is read. Memory
/// that was just allocated overlaps nothing, so for `fresh` results the plan does not look.
enum class ResultMemory : std::uint8_t { callers, fresh };

AttentionPlan plan_attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                                     const AttentionOutputs& outputs, const Context& context,
                                     ResultMemory memory = ResultMemory::callers);
AttentionBackwardPlan plan_attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                                              const AttentionGradients& gradients, const Context& context,
                                              ResultMemory memory = ResultMemory::callers);
GemmPlan plan_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                   const Context& context);
NormPlan plan_norm_forward(const NormInputs& inputs, const NormOptions& options, const NormOutputs& outputs,
                           const Context& context);
NormBackwardPlan plan_norm_backward(const NormInputs& inputs, const NormOptions& options,
                                    const NormGradients& gradients, const Context& context);
RopePlan plan_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                   const Context& context);
FfnPlan plan_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                         const Context& context);
FfnBackwardPlan plan_ffn_backward(const FfnInputs& inputs, const FfnOptions& options,
                                  const FfnGradients& gradients, const Context& context);

// The checks of a call alone, for who has shapes and no data, such as a compiler. They choose no kernel.

void check_attention_inputs(const AttentionInputs& inputs, const AttentionOptions& options,
                            const Context& context);
void check_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                const Context& context);
void check_norm_forward(const NormInputs& inputs, const NormOptions& options, const NormOutputs& outputs,
                        const Context& context);
void check_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                const Context& context);
void check_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                       const Context& context);

}  // namespace tilewise
#pragma GCC visibility pop
