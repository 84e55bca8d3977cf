#include "tuning.h"

#include <string>
#include <vector>

#include "arguments.h"
#include "kinds.h"
#include "tilewise/tuning.h"

namespace tilewise::torch_binding {

using torch::stable::detail::from;

void tuning_begin_op(StableIValue*, std::uint64_t, std::uint64_t) { begin_tuning_questions(); }

void tuning_end_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  std::vector<std::string> lines;
  for (const TuningQuestion& question : end_tuning_questions()) {
    std::string& line = lines.emplace_back(question.device);
    line.append("\t").append(question.table).append("\t").append(question.problem);
    line.append("\t").append(std::to_string(question.default_row));
    for (const std::string& row : question.rows) line.append("\t").append(row);
  }
  stack[0] = from(lines);
}

void use_tuning_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const auto text = taken.take<std::string>();
    text.empty() ? use_tuning_file() : use_tuning(tuning_from_json(text));
  });
}

void tuning_status_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const TuningStatus status = tuning_status();
  const std::vector<std::string> texts = {status.path, status.from_file ? "file" : "", status.trouble,
                                          tuning_to_json(status.choices)};
  stack[0] = from(texts);
}

}  // namespace tilewise::torch_binding
