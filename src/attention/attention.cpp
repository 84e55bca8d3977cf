#include "tilewise/attention.h"

#include <cstring>
#include <new>
#include <type_traits>

#include "attention/kernel.h"
#include "attention/validate.h"
#include "core/plan.h"

namespace tilewise {
namespace {

AttentionCall checked_call(const AttentionInputs& inputs, const AttentionOptions& options,
                           const AttentionOutputs& outputs, const Context& context, ResultMemory memory,
                           Contents contents) {
  return checked_forward(inputs, options, outputs, context, memory, contents);
}
AttentionCall checked_call(const AttentionInputs& inputs, const AttentionOptions& options,
                           const AttentionGradients& gradients, const Context& context, ResultMemory memory,
                           Contents contents) {
  return checked_backward(inputs, options, gradients, context, memory, contents);
}

template <typename Outputs>
PlannedCall<AttentionKernel> planned_call(const AttentionInputs& inputs, const AttentionOptions& options,
                                          const Outputs& outputs, const Context& context, ResultMemory memory,
                                          Contents contents) {
  return {attention_kernel_list(), options.kernel, context,
          [&] { return checked_call(inputs, options, outputs, context, memory, contents); }};
}

}  // namespace

/// A bytewise copy. Copying the tensors of a call member by member takes ten times as many instructions.
template <typename T>
class BytewiseCopy {
 public:
  explicit BytewiseCopy(const T& from) { std::memcpy(bytes_, &from, sizeof(T)); }
  const T& operator*() const { return *std::launder(reinterpret_cast<const T*>(bytes_)); }

 private:
  static_assert(std::is_trivially_copyable_v<T>);
  alignas(T) std::byte bytes_[sizeof(T)];
};

/// A plan keeps the tensors with which it was made, so that those of a later run can be compared with them.
template <typename Outputs>
struct AttentionState {
  PlannedCall<AttentionKernel> planned;
  BytewiseCopy<AttentionInputs> inputs;
  BytewiseCopy<Outputs> outputs;
  ResultMemory memory;

  AttentionState(const AttentionInputs& inputs_, const AttentionOptions& options, const Outputs& outputs_,
                 const Context& context, ResultMemory memory_)
      : planned(planned_call(inputs_, options, outputs_, context, memory_, Contents::unread)),
        inputs(inputs_),
        outputs(outputs_),
        memory(memory_) {}

  /// The planned call on other tensors.
  PlannedCall<AttentionKernel> on(const AttentionInputs& other_inputs, const Outputs& other_outputs) const {
    check_same_form(*inputs, other_inputs);
    check_same_form(*outputs, other_outputs);
    if (memory == ResultMemory::callers) check_apart(other_inputs, other_outputs);
    PlannedCall<AttentionKernel> other = planned;
    set_views(other_inputs, other.call);
    set_views(other_outputs, other.call);
    return other;
  }
};

template <>
struct AttentionPlan::State : AttentionState<AttentionOutputs> {
  using AttentionState::AttentionState;
};
template <>
struct AttentionBackwardPlan::State : AttentionState<AttentionGradients> {
  using AttentionState::AttentionState;
};

template <typename Inputs, typename Outputs>
void Plan<Inputs, Outputs>::run(const Inputs& inputs, const Outputs& outputs, const Context& context) const
  requires std::same_as<Inputs, AttentionInputs>
{
  const PlannedCall<AttentionKernel> call = state().on(inputs, outputs);
  call.run(context);
}

template class Plan<AttentionInputs, AttentionOutputs>;
template class Plan<AttentionInputs, AttentionGradients>;

AttentionPlan plan_attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                                     const AttentionOutputs& outputs, const Context& context,
                                     ResultMemory memory) {
  return PlanAccess::make<AttentionPlan>(inputs, options, outputs, context, memory);
}

AttentionBackwardPlan plan_attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                                              const AttentionGradients& gradients, const Context& context,
                                              ResultMemory memory) {
  return PlanAccess::make<AttentionBackwardPlan>(inputs, options, gradients, context, memory);
}

// These functions plan and run once. Since there is no later run, they keep no tensors. They check arguments
// in the same order as the functions for workspace and explanation, so that all throw the same error.

void attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context) {
  planned_call(inputs, options, outputs, context, ResultMemory::callers, Contents::checked).run_once(context);
}

void attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context) {
  planned_call(inputs, options, gradients, context, ResultMemory::callers, Contents::checked)
      .run_once(context);
}

void check_attention_inputs(const AttentionInputs& inputs, const AttentionOptions& options,
                            const Context& context) {
  checked_inputs(Pass::forward, inputs, options, context);
}

std::size_t attention_forward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                        const AttentionOutputs& outputs, const Context& context) {
  return kernel_workspace(attention_kernel_list(), checked_forward(inputs, options, outputs, context),
                          options.kernel, context);
}

std::size_t attention_backward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                         const AttentionGradients& gradients, const Context& context) {
  return kernel_workspace(attention_kernel_list(), checked_backward(inputs, options, gradients, context),
                          options.kernel, context);
}

Explanation explain_attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                                      const AttentionOutputs& outputs, const Context& context) {
  return explain_kernels(attention_kernel_list(), checked_forward(inputs, options, outputs, context),
                         options.kernel, context);
}

Explanation explain_attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                                       const AttentionGradients& gradients, const Context& context) {
  return explain_kernels(attention_kernel_list(), checked_backward(inputs, options, gradients, context),
                         options.kernel, context);
}

std::vector<std::string_view> attention_kernels() { return kernel_names(attention_kernel_list()); }

}  // namespace tilewise
