#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace tilewise::torch_binding {

/// Collect the questions that calls between the two put to tuning tables. A question is a string with tabs
/// between its fields: device, table, problem, the number of the default row, and the rows.
void tuning_begin_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
void tuning_end_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
/// Takes the contents of a tuning file; an empty string means the file at tuning_path().
void use_tuning_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);
/// Returns the path, "file" if the file is in use, why it is ignored, and the choices in use in the format of
/// a file.
void tuning_status_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t results);

}  // namespace tilewise::torch_binding
