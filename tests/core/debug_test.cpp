#include "core/debug.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "tilewise/gemm.h"
#include "tilewise/norm.h"

// The environment is read once, so each of these is a process of its own.

namespace tilewise::test::debug_test {
namespace {

class Log : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override { std::remove(path().c_str()); }

  // The same in the process that is started anew.
  static std::string path() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    return testing::TempDir() + "tilewise_log_" + test->name();
  }
  static std::vector<std::string> lines() {
    std::ifstream file(path());
    std::vector<std::string> found;
    for (std::string line; std::getline(file, line);) found.push_back(line);
    return found;
  }
};

void multiply() {
  float a[4] = {1, 2, 3, 4}, b[4] = {1, 0, 0, 1}, out[4];
  gemm({.a = Tensor::of(a, {2, 2}), .b = Tensor::of(b, {2, 2})}, {.kernel = "reference"},
       {.out = Tensor::of(out, {2, 2})}, {.parallel_for = serial_parallel_for()});
}

[[noreturn]] void multiply_and_exit(const std::string& log, int times) {
  setenv("TILEWISE_LOG", log.c_str(), 1);
  for (int n = 0; n < times; ++n) multiply();
  std::exit(0);
}

TEST_F(Log, HasALineForEachCall) {
  EXPECT_EXIT(multiply_and_exit(path(), 2), testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(multiply_and_exit(path(), 1), testing::ExitedWithCode(0), "^$");
  const std::vector<std::string> found = lines();
  EXPECT_EQ(found.size(), 3u);  // the second process appends
  const std::regex expected(
      "\\d{4}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d{6}Z \\d+ gemm f32 M2 N2 K2 on cpu: reference");
  for (const std::string& line : found) EXPECT_TRUE(std::regex_match(line, expected)) << line;
}

TEST_F(Log, GoesToStandardError) {
  EXPECT_EXIT(multiply_and_exit("-", 1), testing::ExitedWithCode(0), "gemm f32 M2 N2 K2 on cpu: reference");
}

// A kernel that brings the process down has left its line.
TEST_F(Log, IsWrittenBeforeTheLaunch) {
  const auto crash = [] {
    setenv("TILEWISE_LOG", path().c_str(), 1);
    float a[4] = {}, b[4] = {}, out[4];
    gemm({.a = Tensor::of(a, {2, 2}), .b = Tensor::of(b, {2, 2})}, {.kernel = "reference"},
         {.out = Tensor::of(out, {2, 2})},
         {.parallel_for = {.run = [](std::int64_t, const ParallelFor::Body&) { _exit(7); }, .threads = 2}});
    _exit(8);
  };
  EXPECT_EXIT(crash(), testing::ExitedWithCode(7), "");
  EXPECT_EQ(lines().size(), 1u);
}

TEST_F(Log, SaysOnceThatItCannotBeOpened) {
  EXPECT_EXIT(multiply_and_exit("/nonexistent/log", 2), testing::ExitedWithCode(0),
              "^tilewise: TILEWISE_LOG: cannot open '/nonexistent/log': [^\n]*; nothing is logged\n$");
}

TEST_F(Log, HasWholeLinesOfAllThreads) {
  const auto log_by_threads = [] {
    setenv("TILEWISE_LOG", path().c_str(), 1);
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; ++n) {
      threads.emplace_back([] {
        for (int m = 0; m < 50; ++m) multiply();
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::exit(0);
  };
  EXPECT_EXIT(log_by_threads(), testing::ExitedWithCode(0), "");
  const std::vector<std::string> found = lines();
  EXPECT_EQ(found.size(), 200u);
  for (const std::string& line : found) EXPECT_TRUE(line.ends_with("on cpu: reference")) << line;
}

TEST_F(Log, IsNoneWithoutTheVariable) {
  const auto ask = [] {
    unsetenv("TILEWISE_LOG");
    std::exit(logs_launches() ? 1 : 0);
  };
  EXPECT_EXIT(ask(), testing::ExitedWithCode(0), "");
}

using Check = Log;

[[noreturn]] void ask_for_checks(const char* value) {
  setenv("TILEWISE_CHECK", value, 1);
  std::exit(checks_indices({}) ? 1 : 0);
}

TEST_F(Check, IsAskedForByTheEnvironmentOrTheContext) {
  EXPECT_EXIT(ask_for_checks("1"), testing::ExitedWithCode(1), "");
  EXPECT_EXIT(ask_for_checks("0"), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(ask_for_checks(""), testing::ExitedWithCode(0), "");
  EXPECT_TRUE(checks_indices({.check_indices = true}));
}

}  // namespace
}  // namespace tilewise::test::debug_test
