#include <string>

#include "arguments.h"
#include "attention.h"
#include "layer.h"
#include "tuning.h"

// The schemas of the operators and their implementations. The rest of what torch needs is written in Python:
// gradients, autocast and vmap in tilewise/_ops.py, shapes of results in tilewise/_meta.py.

using namespace tilewise::torch_binding;

namespace {

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
  library.impl("attention_forward", attention_forward_op);
  library.impl("attention_inference", attention_inference_op);
  library.impl("attention_inference.masked", attention_inference_op);
  library.impl("attention_training", attention_training_op);
  library.impl("attention_training.masked", attention_training_op);
  library.impl("attention_backward", attention_backward_op);
  library.impl("attention_training_backward", attention_training_backward_op);
  library.impl("attention_piece", attention_piece_op);
  library.impl("attention_piece_backward", attention_piece_backward_op);
  library.impl("explain_attention", explain_attention_op);
  library.impl("gemm", gemm_op);
  library.impl("explain_gemm", explain_gemm_op);
  library.impl("ffn_forward", ffn_forward_op);
  library.impl("ffn_forward_kept", ffn_forward_kept_op);
  library.impl("ffn_backward", ffn_backward_op);
  library.impl("explain_ffn", explain_ffn_op);
  library.impl("norm_forward", norm_forward_op);
  library.impl("norm_backward", norm_backward_op);
  library.impl("rope", rope_op);
  library.impl("rope_into_cache", rope_into_cache_op);
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
  library.impl("check_attention", check_attention_op);
  library.impl("check_gemm", check_gemm_op);
  library.impl("check_ffn", check_ffn_op);
  library.impl("check_norm", check_norm_op);
  library.impl("check_rope", check_rope_op);
  library.impl("check_rope_into_cache", check_rope_into_cache_op);
}
STABLE_TORCH_LIBRARY_IMPL(tilewise, CompositeExplicitAutograd, library) {
  library.impl("block_lists", block_lists_op);
  library.impl("document_slices", document_slices_op);
  library.impl("prefix_slices", prefix_slices_op);
  library.impl("shared_prompt_slices", shared_prompt_slices_op);
  library.impl("block_causal_slices", block_causal_slices_op);
  library.impl("neighbourhood_slices", neighbourhood_slices_op);
  library.impl("attention_kernels", attention_kernels_op);
  library.impl("cuda_code", cuda_code_op);
  library.impl("simd_levels", simd_levels_op);
  library.impl("version", version_op);
  library.impl("tuning_begin", tuning_begin_op);
  library.impl("tuning_end", tuning_end_op);
  library.impl("use_tuning", use_tuning_op);
  library.impl("tuning_status", tuning_status_op);
}
