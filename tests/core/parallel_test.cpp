#include "core/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <ostream>
#include <thread>
#include <tuple>
#include <vector>

#include "tilewise/context.h"

namespace tilewise {
namespace {

struct Seam {
  const char* name;
  ParallelFor parallel_for;
};

std::ostream& operator<<(std::ostream& out, const Seam& seam) { return out << seam.name; }

std::vector<Seam> seams() {
  return {{"serial", serial_parallel_for()},     {"openmp1", openmp_parallel_for(1)},
          {"openmp2", openmp_parallel_for(2)},   {"openmp5", openmp_parallel_for(5)},
          {"openmpAll", openmp_parallel_for(0)}, {"context", Context{}.parallel_for}};
}

class ParallelTest : public testing::TestWithParam<Seam> {
 protected:
  const ParallelFor& parallel_for() const { return GetParam().parallel_for; }
};

// How often each index was visited.
class Visits {
 public:
  explicit Visits(std::int64_t count)
      : counts_(std::make_unique<std::atomic<int>[]>(static_cast<std::size_t>(count + 1))), count_(count) {}

  void visit(std::int64_t index) {
    if (index < 0 || index >= count_) index = count_;  // one place for all that is out of range
    ++counts_[static_cast<std::size_t>(index)];
  }
  void expect_once_each() const {
    for (std::int64_t index = 0; index < count_; ++index)
      ASSERT_EQ(counts_[static_cast<std::size_t>(index)], 1) << index;
    EXPECT_EQ(counts_[static_cast<std::size_t>(count_)], 0) << "indices out of range";
  }

 private:
  std::unique_ptr<std::atomic<int>[]> counts_;
  std::int64_t count_;
};

TEST_P(ParallelTest, RunsEveryIndexOnce) {
  EXPECT_GE(parallel_for().threads, 1);
  for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 10007}) {
    Visits visits(count);
    parallel_for().run(count, [&](std::int64_t index) { visits.visit(index); });
    SCOPED_TRACE(testing::Message() << "count " << count);
    visits.expect_once_each();
  }
}

TEST_P(ParallelTest, TasksRunOnceEachOnWorkersBelowThreads) {
  for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 10007}) {
    Visits visits(count);
    std::atomic<int> strangers{0};
    for_each_task(parallel_for(), count, [&](std::int64_t worker, std::int64_t index) {
      visits.visit(index);
      if (worker < 0 || worker >= parallel_for().threads) ++strangers;
    });
    SCOPED_TRACE(testing::Message() << "count " << count);
    visits.expect_once_each();
    EXPECT_EQ(strangers, 0);
  }
}

// Scratch memory is picked by worker, so no worker may be in two tasks at once.
TEST_P(ParallelTest, AWorkerHasOneTaskAtATime) {
  std::vector<std::atomic<int>> busy(static_cast<std::size_t>(parallel_for().threads));
  std::atomic<int> clashes{0};
  for_each_task(parallel_for(), 200, [&](std::int64_t worker, std::int64_t) {
    std::atomic<int>& mine = busy[static_cast<std::size_t>(worker)];
    if (mine++ != 0) ++clashes;
    std::this_thread::yield();
    --mine;
  });
  EXPECT_EQ(clashes, 0);
}

TEST_P(ParallelTest, WhatTasksWroteIsVisibleAfterTheCall) {
  std::vector<std::int64_t> squares(5000, -1);
  for_each_task(parallel_for(), 5000, [&](std::int64_t, std::int64_t index) {
    squares[static_cast<std::size_t>(index)] = index * index;
  });
  for (std::int64_t index = 0; index < 5000; ++index)
    ASSERT_EQ(squares[static_cast<std::size_t>(index)], index * index);
}

TEST_P(ParallelTest, NestedCallsRunEverythingOnce) {
  constexpr std::int64_t outer = 6, inner = 50;
  Visits visits(outer * inner);
  for_each_task(parallel_for(), outer, [&](std::int64_t, std::int64_t a) {
    for_each_task(parallel_for(), inner, [&](std::int64_t, std::int64_t b) { visits.visit(a * inner + b); });
  });
  visits.expect_once_each();
}

INSTANTIATE_TEST_SUITE_P(Seams, ParallelTest, testing::ValuesIn(seams()),
                         [](const auto& tested) { return tested.param.name; });

TEST(SerialParallelFor, StaysOnTheCallingThreadAndInOrder) {
  std::vector<std::int64_t> order;
  const auto self = std::this_thread::get_id();
  serial_parallel_for().run(100, [&](std::int64_t index) {
    EXPECT_EQ(std::this_thread::get_id(), self);
    order.push_back(index);
  });
  ASSERT_EQ(order.size(), 100u);
  for (std::size_t index = 0; index < order.size(); ++index)
    EXPECT_EQ(order[index], static_cast<std::int64_t>(index));
}

TEST(OpenmpParallelFor, TakesAsManyThreadsAsAskedAndAtLeastOneByDefault) {
  EXPECT_EQ(openmp_parallel_for(3).threads, 3);
  EXPECT_GE(openmp_parallel_for().threads, 1);
}

// Two tasks that each wait for the other finish only when they run at the same time.
TEST(OpenmpParallelFor, ReallyRunsAtTheSameTime) {
  std::atomic<int> arrived{0};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::atomic<bool> met{true};
  openmp_parallel_for(2).run(2, [&](std::int64_t) {
    ++arrived;
    while (arrived < 2) {
      if (std::chrono::steady_clock::now() > deadline) {
        met = false;
        break;
      }
      std::this_thread::yield();
    }
  });
  EXPECT_TRUE(met);
}

// The longest tasks are put first, which helps only if they also start first.
TEST(ForEachTask, AWorkerTakesTasksInOrder) {
  std::vector<std::vector<std::int64_t>> taken(2);
  for_each_task(openmp_parallel_for(2), 1000, [&](std::int64_t worker, std::int64_t index) {
    taken[static_cast<std::size_t>(worker)].push_back(index);
  });
  EXPECT_EQ(taken[0].size() + taken[1].size(), 1000u);
  for (const auto& indices : taken) EXPECT_TRUE(std::is_sorted(indices.begin(), indices.end()));
}

TEST(ForEachTask, NeverAsksForMoreWorkersThanTasksOrThreads) {
  for (const auto& [threads, count, expected] :
       {std::tuple(8, 3, 3), std::tuple(2, 100, 2), std::tuple(4, 4, 4)}) {
    std::int64_t asked = -1;
    const ParallelFor recording{.run =
                                    [&asked](std::int64_t n, const ParallelFor::Body& body) {
                                      asked = n;
                                      for (std::int64_t index = 0; index < n; ++index) body(index);
                                    },
                                .threads = threads};
    Visits visits(count);
    for_each_task(recording, count, [&](std::int64_t, std::int64_t index) { visits.visit(index); });
    EXPECT_EQ(asked, expected);
    visits.expect_once_each();
  }
}

}  // namespace
}  // namespace tilewise
