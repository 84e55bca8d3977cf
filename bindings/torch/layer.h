#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace tilewise::torch_binding {

// The operators of a layer other than attention, as torch calls them. Their tensors have rows [M, …]; the
// Python package folds other dimensions into M.

inline constexpr const char* gemm_schema =
    "gemm(Tensor a, Tensor b, Tensor? bias=None, Tensor? gate=None, Tensor? gate_bias=None, "
    "Tensor? residual=None, str activation='none', str kernel_name='auto', bool allow_tf32=False) -> Tensor";

inline constexpr const char* ffn_arguments =
    "Tensor x, Tensor up, Tensor down, Tensor? gate=None, Tensor? up_bias=None, Tensor? gate_bias=None, "
    "Tensor? down_bias=None, Tensor? residual=None, str activation='gelu', int max_intermediate_bytes=0, "
    "str kernel_name='auto', bool allow_tf32=False";

inline constexpr const char* norm_forward_schema =
    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float epsilon, bool layer, "
    "str kernel_name='auto') -> (Tensor y, Tensor sum, Tensor rstd, Tensor mean)";
inline constexpr const char* norm_backward_schema =
    "norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor? bias, Tensor rstd, "
    "Tensor mean, bool[] needed, bool layer, str kernel_name='auto') -> Tensor[]";

inline constexpr const char* rope_schema =
    "rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions=None, bool interleaved=False, "
    "bool inverse=False, str kernel_name='auto') -> Tensor[]";
inline constexpr const char* rope_into_cache_schema =
    "rope_into_cache(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cos, "
    "Tensor sin, Tensor? positions=None, Tensor? cache_starts=None, Tensor? page_table=None, "
    "bool interleaved=False, str kernel_name='auto', Tensor? cache_ends=None) -> Tensor";

void gemm_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void ffn_forward_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void ffn_forward_kept_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void ffn_backward_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void norm_forward_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void norm_backward_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void rope_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void rope_into_cache_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
// Only the checks of a call, for tensors without data.
void check_gemm_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void check_ffn_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void check_norm_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void check_rope_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void check_rope_into_cache_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void explain_gemm_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void explain_ffn_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);

}  // namespace tilewise::torch_binding
