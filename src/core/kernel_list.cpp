#include "core/kernel_list.h"

#include "core/arena.h"
#include "core/tuning.h"

namespace tilewise {

void reject_workspace_size() { reject("workspace", "a size below 2^63 bytes", "a problem that needs more"); }

bool has_aligned_workspace(const Context& context, std::size_t needed) {
  if (needed == 0) return true;
  const auto address = reinterpret_cast<std::uintptr_t>(context.workspace.data);
  return address != 0 && address % workspace_alignment == 0 && context.workspace.bytes >= needed;
}

Context with_aligned_workspace(const Context& context, std::size_t needed) {
  check(
      context.workspace.bytes >= needed && (needed == 0 || context.workspace.data != nullptr), "workspace",
      [&] { return "at least " + std::to_string(needed) + " bytes"; },
      [&] {
        return context.workspace.data == nullptr ? "none"
                                                 : std::to_string(context.workspace.bytes) + " bytes";
      });
  Context aligned = context;
  const auto address = reinterpret_cast<std::uintptr_t>(context.workspace.data);
  const std::uintptr_t padding = -address % workspace_alignment;
  if (needed != 0) {
    aligned.workspace = {static_cast<std::byte*>(context.workspace.data) + padding, needed - padding};
  }
  return aligned;
}

void reject_stale_plan() {
  throw DeviceError("the plan was made before the tuning in use, which needs more workspace: plan again");
}

std::string measured_rows(std::string_view before, const std::function<void()>& ask) {
  if (tuning_status().choices.empty()) return {};
  std::string text;
  for (const TuningQuestion& question : tuning_questions(ask)) {
    if (question.taken_row == question.default_row) continue;
    text.append(text.empty() ? before : "; ")
        .append("tuned here: ")
        .append(question.rows[question.taken_row]);
  }
  return text;
}

std::string to_string(const Explanation& explanation) {
  std::string text = explanation.problem + "\n";
  for (const Explanation::Entry& entry : explanation.entries) {
    text += "  " + entry.kernel + ": ";
    switch (entry.verdict) {
      case Explanation::Verdict::chosen:
        text += entry.reason.empty() ? "chosen" : "chosen, " + entry.reason;
        break;
      case Explanation::Verdict::able:
        text += entry.reason.empty() ? "able" : "able, but " + entry.reason;
        break;
      case Explanation::Verdict::unable: text += "cannot: " + entry.reason; break;
    }
    text += "\n";
  }
  return text;
}

}  // namespace tilewise
