#include <string>

#include "arguments.h"
#include "attention.h"
#include "layer.h"
#include "tuning.h"

// The schemas of the operators and their implementations. The rest of what torch needs is written in Python:
// gradients, autocast and vmap in tilewise/_ops.py, shapes of results in tilewise/_meta.py.

namespace {

using tilewise::torch_binding::attention_schema;
using tilewise::torch_binding::plain_attention_schema;

std::string schema(const std::string& name, const std::string& own, const std::string& shared,
                   const std::string& result) {
  return name + "(" + own + shared + ") -> " + result;
}

// The schema of an operator with another name, the same arguments and no result.
std::string without_result(const std::string& name, const std::string& like) {
  const std::size_t begin = like.find('('), end = like.rfind(" -> ");
  return name + like.substr(begin, end - begin) + " -> ()";
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("attention_forward", tilewise::torch_binding::attention_forward_op);
  library.impl("attention_inference", tilewise::torch_binding::attention_inference_op);
  library.impl("attention_inference.masked", tilewise::torch_binding::attention_inference_op);
  library.impl("attention_training", tilewise::torch_binding::attention_training_op);
  library.impl("attention_training.masked", tilewise::torch_binding::attention_training_op);
  library.impl("attention_backward", tilewise::torch_binding::attention_backward_op);
  library.impl("attention_training_backward", tilewise::torch_binding::attention_training_backward_op);
  library.impl("attention_piece", tilewise::torch_binding::attention_piece_op);
  library.impl("attention_piece_backward", tilewise::torch_binding::attention_piece_backward_op);
  library.impl("explain_attention", tilewise::torch_binding::explain_attention_op);
  library.impl("gemm", tilewise::torch_binding::gemm_op);
  library.impl("explain_gemm", tilewise::torch_binding::explain_gemm_op);
  library.impl("ffn_forward", tilewise::torch_binding::ffn_forward_op);
  library.impl("ffn_forward_kept", tilewise::torch_binding::ffn_forward_kept_op);
  library.impl("ffn_backward", tilewise::torch_binding::ffn_backward_op);
  library.impl("explain_ffn", tilewise::torch_binding::explain_ffn_op);
  library.impl("norm_forward", tilewise::torch_binding::norm_forward_op);
  library.impl("norm_backward", tilewise::torch_binding::norm_backward_op);
  library.impl("rope", tilewise::torch_binding::rope_op);
  library.impl("rope_into_cache", tilewise::torch_binding::rope_into_cache_op);
}

}  // namespace

STABLE_TORCH_LIBRARY(tilewise, library) {
  const std::string backward_own =
      "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[] needed, ";
  library.def(schema("attention_forward", "", attention_schema, "(Tensor out, Tensor lse)").c_str());
  library.def(schema("attention_backward", backward_own, attention_schema, "Tensor[]").c_str());
  // Plain calls, which have few options: without a gradient (inference) and with one (training).
  const std::string plain = plain_attention_schema;
  const std::string masked = plain + ", Tensor attn_mask";
  library.def(schema("attention_inference", "", plain, "Tensor").c_str());
  library.def(schema("attention_inference.masked", "", masked, "Tensor").c_str());
  library.def(schema("attention_training", "", plain, "(Tensor out, Tensor lse)").c_str());
  library.def(schema("attention_training.masked", "", masked, "(Tensor out, Tensor lse)").c_str());
  library.def(schema("attention_training_backward", backward_own,
                     plain + ", Tensor? attn_mask, bool deterministic", "Tensor[]")
                  .c_str());
  // A piece of a whole: `place` has the fields of tilewise::Piece. `wide` asks for f32 results, `wide_lse`
  // for an f64 LSE.
  const std::string piece = "int[] place, bool wide, bool wide_lse, ";
  library.def(schema("attention_piece", piece, attention_schema, "(Tensor out, Tensor lse)").c_str());
  library.def(
      schema("attention_piece_backward",
             "Tensor grad_out, Tensor? grad_lse, Tensor? out, Tensor lse, Tensor? delta, bool[] needed, " +
                 piece,
             attention_schema, "Tensor[]")
          .c_str());
  library.def(schema("explain_attention", "bool[] needed, ", attention_schema, "str").c_str());
  using namespace tilewise::torch_binding;
  const std::string gemm = gemm_schema;
  library.def(gemm_schema);
  library.def(("explain_" + gemm.substr(0, gemm.rfind("Tensor")) + "str").c_str());
  library.def(schema("ffn_forward", "", ffn_arguments, "Tensor").c_str());
  library.def(
      schema("ffn_forward_kept", "", ffn_arguments, "(Tensor out, Tensor up_product, Tensor gate_product)")
          .c_str());
  const std::string ffn_backward_own =
      "Tensor grad_out, bool[] needed, Tensor? up_product, Tensor? gate_product, ";
  library.def(schema("ffn_backward", ffn_backward_own, ffn_arguments, "Tensor[]").c_str());
  library.def(schema("explain_ffn", "", ffn_arguments, "str").c_str());
  // Only the checks of calls, for tensors without data.
  library.def(schema("check_attention", "", attention_schema, "()").c_str());
  library.def(schema("check_ffn", "", ffn_arguments, "()").c_str());
  library.def(without_result("check_gemm", gemm_schema).c_str());
  library.def(without_result("check_norm", norm_forward_schema).c_str());
  library.def(without_result("check_rope", rope_schema).c_str());
  library.def(without_result("check_rope_into_cache", rope_into_cache_schema).c_str());
  library.def(norm_forward_schema);
  library.def(norm_backward_schema);
  library.def(rope_schema);
  library.def(rope_into_cache_schema);
  // Masks by ranges: slices are int64 [slices, 7], with the fields of tilewise::MaskSlice.
  library.def(
      "block_lists(Tensor slices, int masks, int length_q, int length_k, int block_q, int block_k) -> "
      "Tensor[]");
  library.def("document_slices(int[] lengths, bool causal) -> Tensor");
  library.def("prefix_slices(int length, int prefix) -> Tensor");
  library.def("shared_prompt_slices(int prompt, int[] responses) -> Tensor");
  library.def("block_causal_slices(int length, int block) -> Tensor");
  library.def("neighbourhood_slices(int[] extents, int[] kernel) -> Tensor");
  library.def("attention_kernels() -> str[]");
  library.def("cuda_code() -> str[]");
  library.def("simd_levels() -> str[]");
  library.def("version() -> str");
  library.def("tuning_begin() -> ()");
  library.def("tuning_end() -> str[]");
  library.def("use_tuning(str contents) -> ()");
  library.def("tuning_status() -> str[]");
}

STABLE_TORCH_LIBRARY_IMPL(tilewise, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(tilewise, CUDA, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(tilewise, Meta, library) {
  library.impl("check_attention", tilewise::torch_binding::check_attention_op);
  library.impl("check_gemm", tilewise::torch_binding::check_gemm_op);
  library.impl("check_ffn", tilewise::torch_binding::check_ffn_op);
  library.impl("check_norm", tilewise::torch_binding::check_norm_op);
  library.impl("check_rope", tilewise::torch_binding::check_rope_op);
  library.impl("check_rope_into_cache", tilewise::torch_binding::check_rope_into_cache_op);
}
STABLE_TORCH_LIBRARY_IMPL(tilewise, CompositeExplicitAutograd, library) {
  library.impl("block_lists", tilewise::torch_binding::block_lists_op);
  library.impl("document_slices", tilewise::torch_binding::document_slices_op);
  library.impl("prefix_slices", tilewise::torch_binding::prefix_slices_op);
  library.impl("shared_prompt_slices", tilewise::torch_binding::shared_prompt_slices_op);
  library.impl("block_causal_slices", tilewise::torch_binding::block_causal_slices_op);
  library.impl("neighbourhood_slices", tilewise::torch_binding::neighbourhood_slices_op);
  library.impl("attention_kernels", tilewise::torch_binding::attention_kernels_op);
  library.impl("cuda_code", tilewise::torch_binding::cuda_code_op);
  library.impl("simd_levels", tilewise::torch_binding::simd_levels_op);
  library.impl("version", tilewise::torch_binding::version_op);
  library.impl("tuning_begin", tilewise::torch_binding::tuning_begin_op);
  library.impl("tuning_end", tilewise::torch_binding::tuning_end_op);
  library.impl("use_tuning", tilewise::torch_binding::use_tuning_op);
  library.impl("tuning_status", tilewise::torch_binding::tuning_status_op);
}
