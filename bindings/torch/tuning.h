#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace tilewise::torch_binding {

/// What calls ask tuning tables between the two. A text a question: device, table, problem, the number of the
/// default row and the rows, with tabs between.
void tuning_begin_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void tuning_end_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
/// Takes the contents of a tuning file, or nothing for the file that is there.
void use_tuning_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
/// Path, "file" where it is in use, why it is ignored, and the choices in use as a file has them.
void tuning_status_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);

}  // namespace tilewise::torch_binding
