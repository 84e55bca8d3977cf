#include <string>

#include "arguments.h"
#include "attention.h"

// Schemas and kernels. What else an operator of torch needs (shapes without data, gradients, autocast, vmap)
// is written in Python, in tilewise/_ops.py.

namespace {

using tilewise::torch_binding::attention_schema;
using tilewise::torch_binding::plain_attention_schema;

std::string schema(const char* name, const char* own, const char* result) {
  return std::string(name) + "(" + own + attention_schema + ") -> " + result;
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("attention_forward", tilewise::torch_binding::attention_forward_op);
  library.impl("attention_inference", tilewise::torch_binding::attention_inference_op);
  library.impl("attention_backward", tilewise::torch_binding::attention_backward_op);
  library.impl("explain_attention", tilewise::torch_binding::explain_attention_op);
}

}  // namespace

STABLE_TORCH_LIBRARY(tilewise, library) {
  library.def(schema("attention_forward", "", "(Tensor out, Tensor lse)").c_str());
  // Without lse, options or a gradient: what is left of attention_forward in a plain call.
  library.def((std::string("attention_inference(") + plain_attention_schema + ") -> Tensor").c_str());
  library.def(schema("attention_backward",
                     "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[] needed, ", "Tensor[]")
                  .c_str());
  library.def(schema("explain_attention", "bool[] needed, ", "str").c_str());
  library.def("attention_kernels() -> str[]");
  library.def("version() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(tilewise, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(tilewise, CUDA, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(tilewise, CompositeExplicitAutograd, library) {
  library.impl("attention_kernels", tilewise::torch_binding::attention_kernels_op);
  library.impl("version", tilewise::torch_binding::version_op);
}
