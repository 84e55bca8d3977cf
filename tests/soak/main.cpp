// Random calls on four streams for minutes. Each stream has a host thread and a few problems, which change
// all the time. They are called, run by plans and replayed as graphs, and every result must have the bits
// that it had with nothing else on the device. Memory of the device and of the host may not grow.

#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "cuda/attention/graph.h"
#include "tilewise/error.h"

namespace {

using namespace tilewise;
using namespace tilewise::test;
using Clock = std::chrono::steady_clock;

struct Settings {
  double seconds = 600;
  int rounds = 10;
  int streams = 4;
  std::uint64_t seed = 1;
  double most_mb = 64;  // that memory may grow between the first round and the last
  bool spoil = false;
};

constexpr std::size_t most_problems = 6;  // of a stream at a time
constexpr std::int64_t longest_burst = 8;

/// Who uses the device: many at once, or one alone. Nobody is passed by those who come later.
class DeviceUse {
 public:
  std::shared_lock<std::shared_mutex> with_others() {
    const std::lock_guard in_line(line_);
    return std::shared_lock(use_);
  }
  std::unique_lock<std::shared_mutex> alone() {
    const std::lock_guard in_line(line_);
    return std::unique_lock(use_);
  }

 private:
  std::mutex line_;
  std::shared_mutex use_;
};

/// What was done, by all streams.
struct Counts {
  std::map<std::string, std::int64_t> calls;    // by way
  std::map<std::string, std::int64_t> kernels;  // problems by kernel
  std::int64_t drawn_again = 0;
  std::vector<std::string> failures;

  void add(const Counts& other) {
    for (const auto& [way, count] : other.calls) calls[way] += count;
    for (const auto& [kernel, count] : other.kernels) kernels[kernel] += count;
    drawn_again += other.drawn_again;
    failures.insert(failures.end(), other.failures.begin(), other.failures.end());
  }
};

RandomProblem draw(Random& random, Bits bits) {
  const std::uint64_t seed = random.bits();
  RandomProblem problem;
  switch (random.between(0, 6)) {
    case 0: problem = random_wgmma_problem(seed); break;
    case 1: problem = random_wgmma_backward_problem(seed); break;
    case 2: problem = random_mma_problem(seed); break;
    case 3: problem = random_mma_f32_problem(seed); break;
    case 4: problem = random_plain_problem(seed); break;
    default: problem = random_problem(seed); break;
  }
  if (random.chance(0.1)) problem.options.precision = Precision::strict;
  return with_bits(std::move(problem), bits);
}

/// The kernel that the library chooses, or now and then another that can take the problem.
std::string draw_kernel(Random& random, const RandomProblem& problem) {
  const OutputBuffers outputs = make_outputs(problem);
  const Explanation explanation =
      explain_attention_forward(on_device(problem.inputs(), first_device), problem.options,
                                on_device(outputs.view(), first_device), {.device = first_device});
  const bool any = random.chance(0.4);
  std::vector<std::string> able;
  for (const Explanation::Entry& entry : explanation.entries) {
    const bool chosen = entry.verdict == Explanation::Verdict::chosen;
    if (chosen || (any && entry.verdict == Explanation::Verdict::able)) able.push_back(entry.kernel);
  }
  if (able.empty()) throw std::logic_error("no kernel takes " + to_string(problem));
  return able[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(able.size()) - 1))];
}

/// A problem on the device, the ways to call it, and the bits that it must have.
class Call {
 public:
  Call(Random& random, const Stream& stream, DeviceUse& use)
      : Call(random.chance(0.5) ? Bits::same : Bits::any, random, stream, use) {}

  const std::string& kernel() const { return kernel_; }
  std::string text() const { return kernel_ + ": " + text_; }

  /// Both passes, from poisoned results on. Returns the way that was taken.
  const char* issue(Random& random, const Stream& stream) const {
    problem_.poison(stream);
    switch (random.between(0, 2)) {
      case 0:
        problem_.forward(stream);
        problem_.backward(stream);
        return "direct";
      case 1: problem_.run(forward_, backward_, stream); return "plan";
      default: graph_->replay(stream); return "graph";
    }
  }
  /// Overwrites the results.
  void spoil(const Stream& stream) const { problem_.poison(stream); }
  /// Whether the results have the same bits. The caller has waited for them.
  bool same() const { return compared() == expected_; }

 private:
  Call(Bits bits, Random& random, const Stream& stream, DeviceUse& use)
      : Call(draw(random, bits), bits, random, stream, use) {}
  Call(const RandomProblem& problem, Bits bits, Random& random, const Stream& stream, DeviceUse& use)
      : kernel_(draw_kernel(random, problem)),
        text_(to_string(problem)),
        bits_(bits),
        problem_(problem, kernel_, bits),
        forward_(problem_.forward_plan()),
        backward_(problem_.backward_plan()) {
    const auto alone = use.alone();
    wait_for_device();
    problem_.run(stream);
    expected_ = compared();
    // Of this thread alone: others may allocate meanwhile.
    graph_ = std::make_unique<Graph>(
        stream, [&] { problem_.run(forward_, backward_, stream); }, cudaStreamCaptureModeThreadLocal);
  }

  /// Of gradients that may differ from run to run, none.
  std::vector<std::byte> compared() const {
    return bits_ == Bits::same ? problem_.results() : problem_.outputs();
  }

  std::string kernel_, text_;
  Bits bits_;
  DeviceProblem problem_;
  AttentionPlan forward_;
  std::optional<AttentionBackwardPlan> backward_;
  std::unique_ptr<Graph> graph_;
  std::vector<std::byte> expected_;
};

/// A new one, and a count of it.
std::unique_ptr<Call> draw_call(Random& random, const Stream& stream, DeviceUse& use, Counts& counts) {
  while (true) {
    try {
      auto call = std::make_unique<Call>(random, stream, use);
      ++counts.kernels[call->kernel()];
      return call;
    } catch (const Unsupported&) {
      // Copies on the device have no gaps, and so other strides than those that the kernel was chosen for.
      ++counts.drawn_again;
    }
  }
}

/// A stream and its host thread until `end`.
Counts run_stream(std::uint64_t seed, bool spoil, Clock::time_point end, DeviceUse& use,
                  std::atomic<bool>& failed) {
  Counts counts;
  try {
    Random random(seed);
    const Stream stream;
    std::vector<std::unique_ptr<Call>> calls;
    const auto any_place = [&] {
      return static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(calls.size()) - 1));
    };
    while (Clock::now() < end && !failed) {
      if (calls.size() < most_problems || random.chance(0.3)) {
        auto call = draw_call(random, stream, use, counts);
        if (calls.size() == most_problems) {
          calls[any_place()] = std::move(call);
        } else {
          calls.push_back(std::move(call));
        }
      }
      const auto lock = use.with_others();
      std::map<std::size_t, std::string> issued;  // the last way that each was called
      for (std::int64_t n = random.between(1, longest_burst); n > 0; --n) {
        const std::size_t place = any_place();
        issued[place] = calls[place]->issue(random, stream);
        ++counts.calls[issued[place]];
        if (spoil) calls[place]->spoil(stream);
      }
      stream.wait();
      for (const auto& [place, way] : issued) {
        if (!calls[place]->same()) {
          counts.failures.push_back("other bits, " + way + ", " + calls[place]->text());
        }
      }
      failed = failed || !counts.failures.empty();
    }
  } catch (const std::exception& error) {
    counts.failures.push_back(std::string("threw ") + error.what());
    failed = true;
  }
  return counts;
}

double megabytes(std::size_t bytes) { return static_cast<double>(bytes / 10'000) / 100; }

/// In use on the device, by whomever.
double device_megabytes() {
  wait_for_device();
  std::size_t free = 0, total = 0;
  cuda::check_cuda(cudaMemGetInfo(&free, &total), "asking for memory");
  return megabytes(total - free);
}

/// Allocated by this process and not freed. What the allocator keeps for later would come and go.
double host_megabytes() {
  const struct mallinfo2 info = mallinfo2();
  return megabytes(info.uordblks + info.hblkhd);
}

void expect_no_growth(const char* what, const std::vector<double>& of_rounds, double most,
                      std::vector<std::string>& failures) {
  const double growth = of_rounds.back() - of_rounds.front();
  if (growth > most) failures.push_back(std::string(what) + " grew by " + std::to_string(growth) + " MB");
}

int run(const Settings& settings) {
  const auto begin = Clock::now();
  const std::chrono::duration<double> round_seconds(settings.seconds / settings.rounds);
  DeviceUse use;
  std::atomic<bool> failed = false;
  Counts counts;
  std::vector<double> device, host;
  for (int round = 0; round < settings.rounds && !failed; ++round) {
    // New threads and streams: what they leave behind would show as well.
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(round_seconds);
    std::vector<Counts> of_streams(static_cast<std::size_t>(settings.streams));
    std::vector<std::thread> threads;
    for (std::size_t n = 0; n < of_streams.size(); ++n) {
      const std::uint64_t seed = settings.seed + static_cast<std::uint64_t>(round) * of_streams.size() + n;
      threads.emplace_back(
          [&, n, seed] { of_streams[n] = run_stream(seed, settings.spoil, end, use, failed); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Counts& of_stream : of_streams) counts.add(of_stream);
    if (failed) break;  // after a fault the device answers nothing
    device.push_back(device_megabytes());
    host.push_back(host_megabytes());
    std::int64_t calls = 0;
    for (const auto& [way, count] : counts.calls) calls += count;
    std::cout << "round " << round + 1 << " of " << settings.rounds << ": " << calls << " calls, device "
              << device.back() << " MB, host " << host.back() << " MB" << std::endl;
  }
  if (!failed) {
    expect_no_growth("memory of the device", device, settings.most_mb, counts.failures);
    expect_no_growth("memory of the host", host, settings.most_mb, counts.failures);
  }
  // DeviceMemory's own, of what was written behind it.
  if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) {
    counts.failures.emplace_back("written behind a tensor; see above");
  }
  for (const std::string& failure : counts.failures) std::cout << "FAILED " << failure << '\n';
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  // What scripts/gpu_soak.py reads.
  std::cout << nlohmann::json{{"seed", settings.seed},
                              {"streams", settings.streams},
                              {"seconds", static_cast<double>(static_cast<std::int64_t>(seconds * 10)) / 10},
                              {"calls", counts.calls},
                              {"problems", counts.kernels},
                              {"drawn_again", counts.drawn_again},
                              {"device_mb", device},
                              {"host_mb", host},
                              {"failures", counts.failures}}
            << std::endl;
  return counts.failures.empty() && !counts.calls.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Random calls on several streams for minutes: the same bits, and no more memory.");
  app.add_option("--seconds", settings.seconds, "how long")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", settings.rounds, "how often memory is looked at, and threads are new")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--streams", settings.streams, "streams, each with a host thread")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "what calls are drawn from")->capture_default_str();
  app.add_option("--most-mb", settings.most_mb, "megabytes that memory may grow after the first round")
      ->capture_default_str();
  app.add_flag("--spoil", settings.spoil, "overwrite results, which must be found");
  CLI11_PARSE(app, argc, argv);
  // All kernels at once, or memory would grow with every one that is called for the first time.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  try {
    if (const CudaPresence cuda = cuda_presence(); !cuda.present) {
      std::cerr << "nothing can be soaked here: " << cuda.reason << '\n';
      return 1;
    }
    return run(settings);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
