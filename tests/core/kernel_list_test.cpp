#include "core/kernel_list.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace tilewise::test {
namespace {

// A list of three: one takes even sizes and leaves those below ten to others, one takes sizes below five, one
// odd ones.
struct Problem {
  int size = 0;
};
struct Call {};
std::string to_string(const Problem& problem) { return "size " + std::to_string(problem.size); }

using ListKernel = Kernel<Problem, Call>;

std::size_t no_workspace(const Call&, const Context&) { return 0; }
void do_nothing(const Call&, const Context&) {}

const std::array<ListKernel, 3> kernels = {{
    {.name = "large",
     .supports = [](const Problem& p) -> std::string { return p.size % 2 == 0 ? "" : "takes even sizes"; },
     .workspace = no_workspace,
     .launch = do_nothing,
     .yields = [](const Problem& p) -> std::string { return p.size < 10 ? "leaves small ones" : ""; }},
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
  const Explanation explanation = explain_kernels(std::span<const ListKernel>(kernels), Problem{4}, "auto");
  ASSERT_EQ(explanation.entries.size(), 3u);
  EXPECT_EQ(explanation.entries[0].verdict, Explanation::Verdict::able);
  EXPECT_EQ(explanation.entries[0].reason, "leaves small ones");
  EXPECT_EQ(explanation.entries[1].verdict, Explanation::Verdict::chosen);
  EXPECT_EQ(explanation.entries[2].verdict, Explanation::Verdict::unable);
}

TEST(KernelList, SaysWhyNoneCan) {
  EXPECT_THROW(chosen(7, "large"), Unsupported);
  EXPECT_THROW(chosen(6, "odd"), Unsupported);
}

}  // namespace
}  // namespace tilewise::test
