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
// strides, types and alignment, and never on the contents of tensors, which are read when the plan runs. So a
// loop can plan once and run many times. attention_forward() and the other functions make a plan and run it
// once.

/// A value of a few kilobytes that owns no other memory. Running does not change it, so several threads may
/// run one plan at the same time, each with its own workspace.
template <typename Inputs, typename Outputs>
class Plan {
 public:
  /// The name of the kernel that was chosen.
  std::string_view kernel() const;
  /// The bytes of workspace that each run needs.
  std::size_t workspace_bytes() const;
  /// All kernels in order of preference, as explain_attention_forward() and its siblings list them.
  Explanation explain() const;

  /// Runs the call on the tensors with which the plan was made. The context must have the planned device and
  /// SIMD level, at most the planned number of threads, and a workspace. It may have any stream.
  void run(const Context& context) const;

  /// Runs the call on other tensors. Exactly the planned tensors must be given, with the same shapes, strides
  /// and types. Where a planned address was a multiple of 2, 4, 8 or 16, the new one must be, too. Otherwise
  /// it throws InvalidArgument, which names the argument, before anything is written.
  void run(const Inputs& inputs, const Outputs& outputs, const Context& context) const
    requires std::same_as<Inputs, AttentionInputs>;

 private:
  friend struct PlanAccess;  // internal to the library
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

/// Where the memory of results comes from. A plan checks that results do not overlap other tensors. Memory
/// that was just allocated overlaps nothing, so the plan skips the check for `fresh` results.
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

// Only the checks of a call, for callers that have shapes and no data, such as compilers. They choose no
// kernel.

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
