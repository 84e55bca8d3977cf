#include <gtest/gtest.h>

#include <deque>
#include <exception>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "cuda/attention/plain_f32.h"

namespace tilewise::test::concurrency_test {
namespace {

constexpr int callers = 4;
constexpr int repetitions = 25;

// A problem of its own for each caller, so that no caller can profit from another's results.
RandomProblem problem_of(const std::string& kernel, int caller, const std::vector<DType>& types) {
  const auto seed = static_cast<std::uint64_t>(10 + caller);
  const DType dtype = types[static_cast<std::size_t>(caller) % types.size()];
  Sizes sizes = sizes_for(kernel);
  if (kernel != "wide") {
    sizes.sq = 200;
    sizes.sk = 300;
  }
  sizes.sq += 37 * caller;
  sizes.sk -= 40 * caller;
  return caller == 0 ? dense_problem(seed, dtype, sizes) : suited_problem(kernel, seed, dtype, sizes);
}

/// Both passes of every problem, on a stream each, again and again; nobody is waited for.
void start_all(std::deque<DeviceProblem>& problems, const std::deque<Stream>& streams) {
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    for (std::size_t caller = 0; caller < callers; ++caller) {
      problems[caller].poison(streams[caller]);
      problems[caller].forward(streams[caller]);
      problems[caller].backward(streams[caller]);
    }
  }
}

class Concurrency : public CudaKernelTest {
 protected:
  void SetUp() override {
    CudaKernelTest::SetUp();
    if (IsSkipped()) return;
    for (int caller = 0; caller < callers; ++caller) {
      const Stream& stream = streams.emplace_back();
      const RandomProblem problem = problem_of(GetParam(), caller, types);
      problems.emplace_back(problem, GetParam());
      alone.push_back(problems.back().run(stream));
    }
  }

  std::deque<Stream> streams;
  std::deque<DeviceProblem> problems;
  std::vector<std::vector<std::byte>> alone;  // results of each, with nothing else on the device
};

TEST_P(Concurrency, FourStreamsAtOnceGiveTheResultsOfOne) {
  start_all(problems, streams);
  for (std::size_t caller = 0; caller < callers; ++caller) {
    streams[caller].wait();
    EXPECT_TRUE(problems[caller].results() == alone[caller]) << "stream " << caller;
  }
}

TEST_P(Concurrency, FourHostThreadsAtOnceGiveTheResultsOfOne) {
  std::latch start(callers);
  std::vector<std::string> failures(callers);
  std::vector<std::thread> threads;
  for (std::size_t caller = 0; caller < callers; ++caller) {
    threads.emplace_back([&, caller] {
      start.arrive_and_wait();
      try {
        for (int repetition = 0; repetition < repetitions && failures[caller].empty(); ++repetition) {
          if (problems[caller].run(streams[caller]) != alone[caller]) failures[caller] = "other results";
        }
      } catch (const std::exception& error) {
        failures[caller] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t caller = 0; caller < callers; ++caller) {
    EXPECT_EQ(failures[caller], "") << "thread " << caller;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Concurrency, testing::ValuesIn(cuda_kernels()), kernel_name);

class PlainF32Streams : public CudaKernelFixture<80>, public testing::WithParamInterface<std::string> {};

TEST_P(PlainF32Streams, FourAtOnceAreWithinTheContract) {
  std::deque<Stream> streams;
  std::deque<RandomProblem> data;
  std::deque<DeviceProblem> problems;
  for (int caller = 0; caller < callers; ++caller) {
    constexpr Data kinds[callers] = {Data::usual, Data::mixed, Data::sharp, Data::usual};
    streams.emplace_back();
    data.push_back(plain_f32_problem(static_cast<std::uint64_t>(30 + caller), kinds[caller]));
    problems.emplace_back(data.back(), GetParam(), Bits::any);
  }
  start_all(problems, streams);
  for (std::size_t caller = 0; caller < callers; ++caller) {
    SCOPED_TRACE("stream " + std::to_string(caller) + ": " + to_string(data[caller]));
    streams[caller].wait();
    expect_within_contract(Checker(data[caller], all_cores()), problems[caller], GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PlainF32Streams, testing::ValuesIn(plain_f32_kernels()), kernel_name);

}  // namespace
}  // namespace tilewise::test::concurrency_test
