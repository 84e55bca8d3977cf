#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "core/every_operation.h"

// A child of fork() has none of its parent's threads.
namespace tilewise::test::fork_test {
namespace {

#ifdef TILEWISE_COVERAGE
extern "C" void __gcov_dump();
#endif

// Ends a child without what the parent registered for its own end. Lines that it ran count.
[[noreturn]] void end_child(int status) {
#ifdef TILEWISE_COVERAGE
  __gcov_dump();
#endif
  _exit(status);
}

// Runs body in a forked child and gives what it returned; 128 + n where signal n ended it. The alarm ends a
// child that waits for ever.
int status_of_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGALRM, SIG_DFL);
    alarm(60);
    end_child(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void run_all(const Context& context, std::vector<std::vector<std::byte>>& results) {
  for (const auto make : every_operation()) {
    const Operation made = make();
    made.run(context);
    for (std::vector<std::byte>& bytes : made.bytes()) results.push_back(std::move(bytes));
  }
}

TEST(Fork, a_child_of_a_parallel_process_computes_the_same_bits) {
  const Context context{.parallel_for = openmp_parallel_for(3)};
  std::vector<std::vector<std::byte>> expected;
  run_all(context, expected);
  const auto same_in_child = [&] {
    std::vector<std::vector<std::byte>> results;
    run_all(context, results);                                   // with the parent's context
    run_all({.parallel_for = openmp_parallel_for(2)}, results);  // and with one of its own
    if (results.size() != 2 * expected.size()) return 2;
    for (std::size_t n = 0; n < results.size(); ++n) {
      if (results[n] != expected[n % expected.size()]) return 1;
    }
    return 0;
  };
  EXPECT_EQ(status_of_child(same_in_child), 0);
  EXPECT_EQ(status_of_child([&] { return status_of_child(same_in_child); }), 0) << "in a grandchild";
  std::vector<std::vector<std::byte>> again;
  run_all(context, again);
  EXPECT_EQ(again, expected) << "in the parent, afterwards";
}

// Two tasks that each wait for the other finish only when they run at the same time.
TEST(Fork, a_child_has_threads_of_its_own) {
  openmp_parallel_for(2).run(2, [](std::int64_t) {});
  EXPECT_EQ(status_of_child([] {
              std::atomic<int> arrived{0};
              openmp_parallel_for(2).run(2, [&](std::int64_t) {
                ++arrived;
                while (arrived < 2) std::this_thread::yield();
              });
              return 0;
            }),
            0);
}

}  // namespace
}  // namespace tilewise::test::fork_test
