#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace tilewise::torch_binding {

// The operators, as torch calls them: they take arguments off the stack and put results there. Their schemas
// are in `library.cpp`.
void attention_forward_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void attention_inference_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void attention_training_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void attention_backward_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void attention_training_backward_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void attention_piece_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void attention_piece_backward_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void explain_attention_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
/// Only the checks of a call, for tensors without data.
void check_attention_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
/// Masks by ranges.
void block_lists_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void document_slices_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void prefix_slices_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void shared_prompt_slices_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void block_causal_slices_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void neighbourhood_slices_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void attention_kernels_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
/// The architectures for which the CUDA kernels were compiled, as CMake names them; none without CUDA.
void cuda_code_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void simd_levels_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void version_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);

}  // namespace tilewise::torch_binding
