#include "core/kernel_list.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>

namespace tilewise::test {
namespace {

// A list of three: one takes even sizes and leaves those below ten to others, one takes sizes below five, one
// odd ones.
struct Problem {
  int size = 0;
};
struct Call {
  Problem problem;
};
std::string to_string(const Problem& problem) { return "size " + std::to_string(problem.size); }

using ListKernel = Kernel<Problem, Call>;

std::size_t no_workspace(const Call&, const Context&) { return 0; }
void do_nothing(const Call&, const Context&) {}

const std::array<ListKernel, 3> kernels = {{
    {.name = "large",
     .supports = [](const Problem& p) -> std::string { return p.size % 2 == 0 ? "" : "takes even sizes"; },
     .workspace = no_workspace,
     .launch = do_nothing,
     .yields = [](const Problem& p) -> std::string {
       return p.size < 10 ? "large is faster for small ones" : "";
     }},
    {.name = "small",
     .supports = [](const Problem& p) -> std::string { return p.size < 5 ? "" : "takes sizes below 5"; },
     .workspace = no_workspace,
     .launch = do_nothing},
    {.name = "odd",
     .supports = [](const Problem& p) -> std::string { return p.size % 2 != 0 ? "" : "takes odd sizes"; },
     .workspace = no_workspace,
     .launch = do_nothing},
}};

std::string chosen(int size, std::string_view name = "auto") {
  return std::string(choose_kernel(std::span<const ListKernel>(kernels), Problem{size}, name).name);
}

TEST(KernelList, TakesTheFirstThatCan) {
  EXPECT_EQ(chosen(12), "large");
  EXPECT_EQ(chosen(3), "small");
  EXPECT_EQ(chosen(7), "odd");
}

TEST(KernelList, PassesOverOneThatYieldsWhereAnotherCan) {
  EXPECT_EQ(chosen(4), "small");
  EXPECT_EQ(chosen(8), "large");  // no other can
  EXPECT_EQ(chosen(4, "large"), "large");
}

TEST(KernelList, ExplainsTheSameChoice) {
  const Explanation explanation =
      explain_kernels(std::span<const ListKernel>(kernels), Call{{4}}, "auto", {});
  ASSERT_EQ(explanation.entries.size(), 3u);
  EXPECT_EQ(explanation.entries[0].verdict, Explanation::Verdict::able);
  EXPECT_EQ(explanation.entries[0].reason, "large is faster for small ones");
  EXPECT_EQ(explanation.entries[1].verdict, Explanation::Verdict::chosen);
  EXPECT_EQ(explanation.entries[2].verdict, Explanation::Verdict::unable);
}

// Sizes from 100 on are on trial in the first kernel of a list; the second takes all sizes.
class Trial : public testing::Test {
 protected:
  static constexpr std::array<ListKernel, 2> trial_kernels = {{
      {.name = "new",
       .supports = [](const Problem& p) -> std::string { return p.size > 1000 ? "takes no huge sizes" : ""; },
       .workspace = no_workspace,
       .launch = do_nothing,
       .trial = [](const Problem& p) -> std::string { return p.size < 100 ? "" : "large sizes"; }},
      {.name = "old",
       .supports = [](const Problem&) -> std::string { return ""; },
       .workspace = no_workspace,
       .launch = do_nothing},
  }};
  static constexpr std::span<const ListKernel> list = trial_kernels;

  void SetUp() override { unsetenv("TILEWISE_TRIAL"); }
  void TearDown() override { unsetenv("TILEWISE_TRIAL"); }

  static std::string chosen(int size, std::string_view name = "auto") {
    return std::string(choose_kernel(list, Problem{size}, name).name);
  }
  static Explanation::Entry explained(int size, std::string_view name) {
    return explain_kernels(list, Call{{size}}, name, {}).entries[0];
  }
};

TEST_F(Trial, IsTakenByNameAndWithTheVariableAlone) {
  EXPECT_EQ(chosen(99), "new");
  EXPECT_EQ(chosen(100), "old");
  EXPECT_THROW(chosen(100, "new"), Unsupported);
  setenv("TILEWISE_TRIAL", "0", 1);
  EXPECT_THROW(chosen(100, "new"), Unsupported);
  setenv("TILEWISE_TRIAL", "1", 1);
  EXPECT_EQ(chosen(100, "new"), "new");
  EXPECT_EQ(chosen(100), "old");
  EXPECT_THROW(chosen(2000, "new"), Unsupported);
}

TEST_F(Trial, IsNamedInExplanations) {
  const std::string alone = "trial: runs large sizes only when named and with TILEWISE_TRIAL=1";
  EXPECT_EQ(explained(100, "new").verdict, Explanation::Verdict::unable);
  EXPECT_EQ(explained(100, "new").reason, alone);
  setenv("TILEWISE_TRIAL", "1", 1);
  EXPECT_EQ(explained(100, "auto").verdict, Explanation::Verdict::unable);
  EXPECT_EQ(explained(100, "auto").reason, alone);
  EXPECT_EQ(explained(100, "new").verdict, Explanation::Verdict::chosen);
  EXPECT_EQ(to_string(explain_kernels(list, Call{{100}}, "new", {})),
            "size 100\n  new: chosen, trial: large sizes\n  old: able\n");
  EXPECT_EQ(explained(99, "new").reason, "");
}

TEST(KernelList, GivesALaunchTheConfigurationOfItsPlan) {
  static int launched;
  launched = 0;
  const ListKernel kernel = {.name = "configured",
                             .supports = [](const Problem&) -> std::string { return ""; },
                             .configure = [](const Call& call, const Context&) -> Configuration {
                               return {.workspace_bytes = 100, .row = call.problem.size};
                             },
                             .launch_configured = [](const Call&, const Configuration& configuration,
                                                     const Context&) { launched += configuration.row; }};
  const Configuration configuration = configure_kernel(kernel, Call{{3}}, {});
  EXPECT_EQ(configuration.row, 3);
  EXPECT_EQ(workspace_for(configuration), 163u);
  launch_kernel(kernel, Call{{0}}, configuration, {});
  EXPECT_EQ(launched, 3);
  // A kernel inside of another must find its workspace as it was asked for.
  std::array<std::byte, 100> memory{};
  launch_inner(kernel, Call{{4}}, {.workspace = {memory.data(), 100}});
  EXPECT_EQ(launched, 7);
  EXPECT_THROW(launch_inner(kernel, Call{{4}}, {.workspace = {memory.data(), 99}}), DeviceError);
  EXPECT_EQ(launched, 7);
  // One without configurations.
  EXPECT_EQ(workspace_for(configure_kernel(kernels[0], Call{{4}}, {})), 0u);
  launch_inner(kernels[0], Call{{4}}, {});
}

TEST(KernelList, SaysWhyNoneCan) {
  EXPECT_THROW(chosen(7, "large"), Unsupported);
  EXPECT_THROW(chosen(6, "odd"), Unsupported);
}

}  // namespace
}  // namespace tilewise::test
