#include "cuda/tile/tuning_table.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "support/device.h"

namespace tilewise::test::tuning_table_test {

struct Config {
  int dim = 0;
  int warps = 4;
  template <typename To>
  constexpr void describe(To& to) const {
    to.number("dim", dim);
    to.number("warps", warps);
  }
};
struct Table {
  static constexpr std::string_view name = "test";
  static constexpr Config rows[] = {{64, 8}, {64, 4}, {128, 8}, {128, 4}};
};
struct Problem {
  int dim = 0;
};
template <typename Text>
void describe_problem(const Problem& problem, Description<Text>& to) {
  to.number("dim", problem.dim);
}
inline Device tuning_device(const Problem&) { return {Device::Type::cuda, 0}; }

namespace {

using namespace cuda;

TEST(TuningTable, TakesTheAbleRowOfTheLeastCost) {
  const auto of_dim = [](int dim) { return [dim](const Config& c) { return c.dim == dim; }; };
  const auto warps = [](int row) { return Table::rows[row].warps; };
  EXPECT_EQ(least_row<Table>(of_dim(64), warps), 1);
  EXPECT_EQ(least_row<Table>(of_dim(128), warps), 3);
  EXPECT_EQ(least_row<Table>(of_dim(128), [](int) { return 0; }), 2);
  EXPECT_EQ(least_row<Table>(of_dim(256), warps), -1);
  EXPECT_EQ(first_row<Table>(of_dim(128)), 2);
  EXPECT_EQ(first_row<Table>(of_dim(256)), -1);
  EXPECT_EQ(
      smallest<Table>([](const Config& c) { return c.dim > 64; }, [](const Config& c) { return c.dim; }),
      128);
  EXPECT_EQ(smallest<Table>(of_dim(256), [](const Config& c) { return c.dim; }), 0);
}

TEST(TuningTable, TakesTheFirstRowThatFillsElseTheLast) {
  const auto all = [](const Config&) { return true; };
  for (const auto& [first_filling, expected] :
       std::vector<std::pair<int, int>>{{0, 0}, {2, 2}, {3, 3}, {4, 3}}) {
    const int from = first_filling;
    EXPECT_EQ(least_row<Table>(all, [from](int row) { return fill_cost<Table>(row, row >= from); }),
              expected);
  }
}

TEST(TuningTable, MakesTheRowAConstant) {
  std::vector<int> seen;
  with_row<Table>(2, [&](auto row) {
    constexpr Config c = Table::rows[row];
    seen.push_back(c.dim + c.warps);
  });
  with_row<Table>(-1, [&](auto) { seen.push_back(-1); });
  EXPECT_EQ(seen, std::vector<int>{136});
}

TEST(TuningTable, GoesByMeasurementsOfThisProblemAlone) {
  if (const CudaPresence cuda = cuda_presence(); !cuda.present) GTEST_SKIP() << cuda.reason;
  const auto able = [](const Config& c) { return c.dim == 64; };
  const auto choose = [&](int dim) {
    return choose_row_of<Table>(Problem{dim}, able, [](int row) { return row; });
  };
  use_tuning({});
  const std::vector<TuningQuestion> heard = tuning_questions([&] { EXPECT_EQ(choose(40), 0); });
  ASSERT_EQ(heard.size(), 1u);
  EXPECT_EQ(heard[0].problem, "dim=40");
  EXPECT_EQ(heard[0].rows, (std::vector<std::string>{"dim=64 warps=8", "dim=64 warps=4"}));
  TuningChoice choice{heard[0].device, "test", "dim=40", "dim=64 warps=4"};
  use_tuning(std::vector<TuningChoice>{choice});
  EXPECT_EQ(choose(40), 1);
  EXPECT_EQ(choose(41), 0);
  choice.row = "dim=128 warps=4";  // which is not able
  use_tuning(std::vector<TuningChoice>{choice});
  EXPECT_EQ(choose(40), 0);
  use_tuning({});
}

}  // namespace
}  // namespace tilewise::test::tuning_table_test
