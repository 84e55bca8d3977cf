#include "fuzz/oracle.h"

#include <algorithm>
#include <array>
#include <optional>

#include "fuzz/hostile.h"
#include "fuzz/memory.h"

namespace tilewise::fuzz {
namespace {

// More is asked for by some calls that are right, but takes long.
constexpr std::size_t most_workspace = std::size_t{1} << 24;

// One thread under the name of several, with tasks from the first to the last, from the last to the first, or
// from the middle on.
ParallelFor parallel_for(int threads, int order) {
  return {.run =
              [order](std::int64_t n, const ParallelFor::Body& body) {
                for (std::int64_t index = 0; index < n; ++index) {
                  body(order == 0 ? index : order == 1 ? n - 1 - index : (index + n / 2) % n);
                }
              },
          .threads = threads};
}

// What came of a call.
struct Outcome {
  enum class Kind : std::uint8_t { returned, invalid, unsupported } kind = Kind::returned;
  std::string text{};
  bool returned() const { return kind == Kind::returned; }
};

template <typename Body>
Outcome outcome_of(const Call& call, const char* function, const Body& body) {
  try {
    body();
    return {};
  } catch (const InvalidArgument& error) {
    return {Outcome::Kind::invalid, error.what()};
  } catch (const Unsupported& error) {
    return {Outcome::Kind::unsupported, error.what()};
  } catch (const std::exception& error) {
    fail(call, std::string(function) + " threw what is no error of an argument: " + error.what());
  }
}

class Check {
 public:
  Check(Call& call, const Input& input) : call_(call), input_(input) {}

  void all() {
    const Memory memory(call_, 0);
    std::size_t bytes = 0;
    const Outcome asked = outcome_of(call_, "workspace", [&] { bytes = call_.workspace(call_.context); });
    expect_untouched(memory, "workspace");
    check_explanation(asked);
    expect_untouched(memory, "explain");
    if (!asked.returned()) return check_refusal(memory, asked);
    for (const Argument& argument : call_.arguments) {
      const Tensor& view = *argument.view;
      if (view.given() && view.data == nullptr && !is_empty(view)) {
        fail(call_, "null data is taken: " + std::string(argument.name));
      }
    }
    if (std::all_of(call_.arguments.begin(), call_.arguments.end(), has_memory) && bytes <= most_workspace) {
      check_workspace(memory, bytes);
      check_results(memory);
    }
  }

 private:
  // What stands for memory that could not be made is for the checks of arguments alone.
  static bool has_memory(const Argument& argument) {
    const Tensor& view = *argument.view;
    return !view.given() || argument.address == 0 || is_empty(view) || span_of(view).has_value();
  }

  void expect_untouched(const Memory& memory, const std::string& after) {
    const std::string damaged = memory.damage(false);
    if (!damaged.empty()) fail(call_, after + " wrote to " + damaged);
  }

  Outcome run(Workspace workspace) {
    Context context = call_.context;
    context.workspace = workspace;
    return outcome_of(call_, "the call", [&] { call_.run(context); });
  }

  void check_refusal(const Memory& memory, const Outcome& asked) {
    const ScratchMemory scratch(64, 0);  // the check of its size comes last
    const Outcome made = run({scratch.data(), 64});
    if (made.kind != asked.kind || made.text != asked.text) {
      fail(call_, "workspace says '" + asked.text + "', the call '" + made.text + "'");
    }
    expect_untouched(memory, "a call that threw '" + made.text + "'");
    if (input_.mistakes() == 0) fail(call_, "refused, though nothing is wrong: " + made.text);
  }

  void check_explanation(const Outcome& asked) {
    std::vector<Explanation> found;
    const Outcome explained = outcome_of(call_, "explain", [&] { found = call_.explain(call_.context); });
    // A layer asks its operations in turn. The call ends at the first that no kernel can take, explain does
    // not.
    if (call_.kernel == nullptr && asked.kind == Outcome::Kind::unsupported) return;
    const bool wrong = asked.kind == Outcome::Kind::invalid;
    if (explained.returned() == wrong || (wrong && explained.text != asked.text)) {
      fail(call_, "workspace says '" + asked.text + "', explain '" + explained.text + "'");
    }
    if (!explained.returned()) return;
    bool all_chosen = true;
    for (const Explanation& explanation : found) {
      const auto count =
          std::count_if(explanation.entries.begin(), explanation.entries.end(),
                        [](const auto& entry) { return entry.verdict == Explanation::Verdict::chosen; });
      if (count > 1) fail(call_, "explain chooses twice");
      all_chosen = all_chosen && count == 1;
      for (const auto& entry : explanation.entries) {
        if (entry.verdict == Explanation::Verdict::chosen) chosen_ = entry.kernel;
        if (entry.verdict == Explanation::Verdict::unable) unable_ = entry.kernel;
        if (entry.verdict == Explanation::Verdict::able) able_ = entry.kernel;
      }
    }
    if (all_chosen != asked.returned()) {
      fail(call_, all_chosen ? "explain chooses, but the call says '" + asked.text + "'"
                             : "explain chooses nothing, but the call runs");
    }
  }

  void check_workspace(const Memory& memory, std::size_t bytes) {
    if (bytes == 0) return;
    const ScratchMemory scratch(bytes - 1, 0);
    for (const Workspace small : {Workspace{scratch.data(), bytes - 1}, Workspace{nullptr, bytes}}) {
      if (run(small).kind != Outcome::Kind::invalid) fail(call_, "too small a workspace is taken");
      expect_untouched(memory, "a call with too small a workspace");
    }
  }

  std::vector<std::byte> results_of(const Memory& memory, std::uint64_t variant) {
    const std::size_t bytes = call_.workspace(call_.context);
    const ScratchMemory scratch(bytes, variant);
    const Outcome made = run({scratch.data(), bytes});
    if (!made.returned()) fail(call_, "workspace returned, but the call threw '" + made.text + "'");
    const std::string damaged = memory.damage(true);
    if (!damaged.empty()) fail(call_, "written beside the elements of outputs: " + damaged);
    return memory.results();
  }

  void check_results(const Memory& memory) {
    const std::vector<std::byte> results = results_of(memory, 0);
    const Tensor* pages = call_.written_pages;
    if (pages != nullptr && pages->given() && has_repeated_element(*pages)) return;
    const Context context = call_.context;
    const std::uint8_t order = input_.order();
    call_.context.parallel_for = parallel_for(1 + order % 4, order / 4 % 3);
    if (results_again() != results) {
      fail(call_, "other threads, another order of tasks or what is not to be read changed the results");
    }
    call_.context = context;
    if (call_.kernel == nullptr) return;
    const std::string_view kernel = *call_.kernel;
    if (input_.checks() % 4 == 1 && !chosen_.empty()) {
      *call_.kernel = chosen_;
      if (results_again() != results) fail(call_, "the kernel that explain names gives other bits");
    }
    if (input_.checks() % 4 == 2 && !able_.empty()) {
      *call_.kernel = able_;
      static_cast<void>(results_again());
    }
    if (input_.checks() % 4 == 3 && !unable_.empty()) {
      *call_.kernel = unable_;
      const Memory again(call_, 1);
      const Outcome asked = outcome_of(call_, "workspace", [&] { call_.workspace(call_.context); });
      if (asked.kind != Outcome::Kind::unsupported) fail(call_, "explain says it cannot, but it runs");
    }
    *call_.kernel = kernel;
  }

  std::vector<std::byte> results_again() {
    const Memory memory(call_, 1);
    return results_of(memory, 1);
  }

  Call& call_;
  const Input& input_;
  std::string chosen_, able_, unable_;  // by explain
};

}  // namespace

void check_call(Call& call, const Input& input) {
  const std::vector<std::string_view> levels = simd_levels();
  const std::uint8_t order = input.order();
  call.context.parallel_for = parallel_for(1 + order / 12 % 3, 0);
  if (input.level() % 4 != 0 && !levels.empty())
    call.context.simd_level = levels[input.level() % levels.size()];
  if (!take_contents(call)) return;
  for (std::size_t n = 0; n < input.mistakes(); ++n) {
    make_mistake(call, input.mistake(n));
  }
  Check(call, input).all();
}

}  // namespace tilewise::fuzz
