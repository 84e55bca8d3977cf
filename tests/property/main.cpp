// Compares every kernel, at every SIMD level, with the reference on random problems of the whole contract.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "property/check.h"
#include "property/operations.h"
#include "property/self_test.h"
#include "support/pieces.h"

namespace {

using namespace tilewise;
using namespace tilewise::test;

struct Settings {
  bool cuda = false;
  std::int64_t count = 2000;
  std::string seed = "1";
  std::string only;
  std::vector<std::string> kernels;  // empty: all
  std::string domain = "whole";
  std::string rule = "standard";
  std::string level;
  int threads = 2;
  bool pieces = false;
  bool verbose = false;
  bool self_test = false;
  bool no_self_test = false;
};

// The run stops after this number of failures, since each takes many draws of the path.
constexpr std::int64_t most_failures = 20;

std::string hexadecimal(std::uint64_t value) {
  std::ostringstream text;
  text << "0x" << std::hex << value;
  return text.str();
}

std::vector<std::string> strings(const std::vector<std::string_view>& names) {
  return {names.begin(), names.end()};
}

std::vector<std::string> all_kernels() {
  std::vector<std::string> names = strings(attention_kernels());
  const std::vector<std::string> more = operation_kernels();
  names.insert(names.end(), more.begin(), more.end());
  return names;
}

bool chosen(const Settings& settings, std::string_view kernel) {
  return settings.kernels.empty() ||
         std::find(settings.kernels.begin(), settings.kernels.end(), kernel) != settings.kernels.end();
}

RandomProblem draw(std::string_view domain, std::uint64_t seed) {
  if (domain == "wgmma") return random_wgmma_problem(seed);
  if (domain == "wgmma-blocks") return random_wgmma_block_problem(seed);
  if (domain == "wgmma-masks") return random_wgmma_mask_problem(seed);
  if (domain == "wgmma-f32") return random_wgmma_problem(seed, true);
  if (domain == "wgmma-backward") return random_wgmma_backward_problem(seed);
  if (domain == "wgmma-features") return random_wgmma_features_problem(seed);
  if (domain == "mma") return random_mma_problem(seed);
  if (domain == "mma-f32") return random_mma_f32_problem(seed);
  if (domain == "plain") return random_plain_problem(seed);
  if (domain == "wide-heads") return random_wide_heads_problem(seed);
  if (domain == "wide-f32") return random_wide_f32_problem(seed);
  return random_problem(seed);
}

// For each kernel, the number of pieces that it computed and that it left to fused.
std::map<std::string, PieceRunner>& piece_runners() {
  static std::map<std::string, PieceRunner> runners;
  return runners;
}

// A kernel that computes a problem in pieces on the first CUDA device. Statistics are f64 for f32 inputs and
// f32 or f64 for others, since kernels with 16-bit products take only f32.
Subject subject_in_pieces(const std::string& kernel, std::uint64_t seed) {
  const auto runner = [=](const AttentionInputs& inputs) -> PieceRunner& {
    PieceRunner& found = piece_runners()[kernel];
    found.device = {Device::Type::cuda, 0};
    const bool wide = inputs.q.dtype == DType::f32 || (kernel == "fused" && seed % 2 == 0);
    found.statistics = wide ? DType::f64 : DType::f32;
    return found;
  };
  return {.kernel = kernel,
          .device = {Device::Type::cuda, 0},
          .repetition = 0.2,
          .forward =
              [=](const AttentionInputs& inputs, const AttentionOptions& options,
                  const AttentionOutputs& outputs, const Context& context) {
                forward_in_pieces(seed, inputs, options, outputs, context, runner(inputs));
              },
          .backward =
              [=](const AttentionInputs& inputs, const AttentionOptions& options,
                  const AttentionGradients& gradients, const Context& context) {
                backward_in_pieces(seed, inputs, options, gradients, context, runner(inputs));
              }};
}

// The chosen kernels. simd is tested at the best level and at another one, so that over a run all levels are
// tested.
std::vector<Subject> subjects_of(const Settings& settings, std::uint64_t seed) {
  std::vector<Subject> subjects;
  if (settings.cuda) {
    for (const std::string_view name : attention_kernels()) {
      if (!chosen(settings, name)) continue;
      if (settings.pieces) {
        subjects.push_back(subject_in_pieces(std::string(name), seed));
        continue;
      }
      subjects.push_back({.kernel = std::string(name),
                          .device = {Device::Type::cuda, 0},
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda});
    }
    return subjects;
  }
  for (const std::string_view name : attention_kernels()) {
    const std::string kernel(name);
    if (!chosen(settings, kernel)) continue;
    const std::vector<std::string_view> levels = simd_levels();
    if (kernel != "simd") {
      // The reference is slow, so it is run a second time only in some problems.
      subjects.push_back({.kernel = kernel, .repetition = kernel == "reference" ? 0.2 : 1.0});
    } else if (!settings.level.empty()) {
      subjects.push_back({.kernel = kernel, .level = settings.level});
    } else if (!levels.empty()) {
      subjects.push_back({.kernel = kernel, .level = std::string(levels.front())});
      if (levels.size() == 1) continue;
      Random rng(seed + 4);
      const auto other =
          static_cast<std::size_t>(rng.between(1, static_cast<std::int64_t>(levels.size()) - 1));
      subjects.push_back({.kernel = kernel, .level = std::string(levels[other])});
    }
  }
  return subjects;
}

// The number of problems that a kernel computed, and of those whose backward was repeated to compare bits.
struct Taken {
  std::int64_t forward = 0;
  std::int64_t backward = 0;
  std::int64_t again = 0;

  void add(const Taken& other) {
    forward += other.forward;
    backward += other.backward;
    again += other.again;
  }
};
using TakenOfTypes = std::map<DType, Taken>;
using TakenBy = std::map<std::string, TakenOfTypes>;  // by kernel, with its SIMD level if it has one

// scripts/gpu_property.py parses this text.
std::string text_of(const Taken& taken) {
  return std::to_string(taken.forward) + " forward, " + std::to_string(taken.backward) + " backward, " +
         std::to_string(taken.again) + " backward again";
}

// On a GPU fused takes the whole contract except for f64 and the backward of paged keys, which these problems
// do not have.
std::vector<std::string> refusals(const Settings& settings, const Checker& checker, const Subject& subject,
                                  const Passes& ran) {
  if (!settings.cuda || settings.domain != "whole" || subject.kernel != "fused") return {};
  if (!ran.forward) return {"fused forward: refused, though it takes everything"};
  if (checker.differentiable() && !ran.backward)
    return {"fused backward: refused, though it takes everything"};
  return {};
}

std::vector<std::string> failures_of(const Settings& settings, const RandomProblem& problem,
                                     TakenBy& taken_by) {
  try {
    const Checker checker(problem, settings.threads);
    std::vector<std::string> failures = checker.reference_failures();
    for (const Subject& subject : subjects_of(settings, problem.seed)) {
      Passes ran;
      std::vector<std::string> found = checker.check(subject, &ran);
      if (found.empty()) found = refusals(settings, checker, subject, ran);
      const std::string name = subject.kernel + (subject.level.empty() ? "" : " " + subject.level);
      taken_by[name][problem.dtype].add({ran.forward, ran.backward, ran.backward_again});
      failures.insert(failures.end(), found.begin(), found.end());
    }
    return failures;
  } catch (const std::exception& error) {
    return {std::string("reference in f64: threw ") + error.what()};
  }
}

// On a terminal, updates one line. Elsewhere, prints a line after every tenth of the problems.
class Progress {
 public:
  explicit Progress(std::int64_t total) : total_(total) {}

  void show(std::int64_t done, std::int64_t failed) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    const bool tenth = done * 10 / total_ > shown_ * 10 / total_;
    if (terminal_ ? seconds - last_ < 0.2 && done < total_ : !tenth) return;
    shown_ = done;
    last_ = seconds;
    std::printf("%s%lld of %lld problems, %lld failed, %.0f s%s", terminal_ ? "\r" : "",
                static_cast<long long>(done), static_cast<long long>(total_), static_cast<long long>(failed),
                seconds, terminal_ && done < total_ ? "" : "\n");
    std::fflush(stdout);
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::int64_t total_;
  std::int64_t shown_ = 0;
  double last_ = 0;
  bool terminal_ = isatty(STDOUT_FILENO) == 1;
  Clock::time_point start_ = Clock::now();
};

// A problem and the failures that it showed.
struct Checked {
  std::string problem;
  std::vector<std::string> failures;
};

Checked check_seed(const Settings& settings, std::uint64_t seed, TakenBy& taken_by) {
  if (settings.domain == "operations") {
    const Device device = settings.cuda ? Device{Device::Type::cuda, 0} : Device{};
    const CheckedOperation checked = check_operation(seed, device, settings.kernels);
    for (const auto& [kernel, passes] : checked.taken) {
      taken_by[kernel][checked.dtype].add({passes.forward, passes.backward, 0});
    }
    return {checked.problem, checked.failures};
  }
  RandomProblem problem = draw(settings.domain, seed);
  if (settings.rule == "strict") problem.options.precision = Precision::strict;
  return {to_string(problem), failures_of(settings, problem, taken_by)};
}

void report(const Settings& settings, std::uint64_t seed, const Checked& checked) {
  std::cout << "\nFAILED " << checked.problem << '\n';
  for (const std::string& failure : checked.failures) std::cout << "  " << failure << '\n';
  std::cout << "  reproduce: tilewise_property --only " << hexadecimal(seed) << " --threads "
            << settings.threads << " --domain " << settings.domain << " --rule " << settings.rule
            << (settings.cuda ? " --cuda" : "") << (settings.pieces ? " --pieces" : "") << std::endl;
}

int run(const Settings& settings) {
  std::vector<std::uint64_t> seeds;
  if (!settings.only.empty()) {
    seeds.push_back(std::stoull(settings.only, nullptr, 0));
  } else {
    const std::uint64_t base =
        settings.seed == "random" ? std::random_device{}() : std::stoull(settings.seed, nullptr, 0);
    Random rng(base);
    while (static_cast<std::int64_t>(seeds.size()) < settings.count) {
      const std::uint64_t seed = rng.bits();
      if (!settings.pieces || suits_pieces(draw(settings.domain, seed))) seeds.push_back(seed);
    }
    std::cout << settings.count << " problems from seed " << base << std::endl;
  }
  constexpr std::int64_t enough_problems = 20;  // with fewer problems, a kernel may be able to compute none
  Progress progress(static_cast<std::int64_t>(seeds.size()));
  std::int64_t done = 0;
  std::int64_t failed = 0;
  TakenBy taken_by;
  for (const std::uint64_t seed : seeds) {
    const Checked checked = check_seed(settings, seed, taken_by);
    if (settings.verbose) std::cout << hexadecimal(seed) << ' ' << checked.problem << std::endl;
    if (!checked.failures.empty()) {
      ++failed;
      report(settings, seed, checked);
    }
    progress.show(++done, failed);
    if (failed == most_failures) {
      std::cout << "stopped at the failure number " << failed << std::endl;
      break;
    }
  }
  bool took_some = settings.kernels.empty() || settings.pieces || done < enough_problems;
  for (const auto& [kernel, of_types] : taken_by) {
    Taken sum;
    for (const auto& [dtype, taken] : of_types) sum.add(taken);
    took_some = took_some || sum.forward + sum.backward > 0;
    if (sum.forward == 0 && settings.kernels.empty()) continue;  // kernels of another device
    std::cout << kernel << " took " << text_of(sum) << '\n';
    for (const auto& [dtype, taken] : of_types) {
      if (taken.forward > 0) std::cout << "  of " << to_string(dtype) << ' ' << text_of(taken) << '\n';
    }
  }
  if (!took_some) {  // a run that checks nothing must not pass
    std::cout << "FAILED the kernels that were named took no problem of this domain\n";
    ++failed;
  }
  for (const auto& [kernel, runner] : piece_runners()) {
    std::cout << kernel << " took " << runner.taken << " pieces, and left " << runner.left << " to fused\n";
    const bool some = runner.taken > 0 || done < enough_problems;
    if (some && (kernel != "fused" || runner.left == 0)) continue;
    std::cout << "FAILED " << kernel
              << (runner.taken == 0 ? ": took no piece" : ": refused a piece, though it takes all") << '\n';
    ++failed;
  }
  std::cout << done - failed << " passed, " << failed << " failed" << std::endl;
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Checks every kernel against the reference on random problems.");
  app.add_option("--count", settings.count, "number of problems")
      ->envname("TILEWISE_PROPERTY_COUNT")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "the seed of the problems; 'random' for a new one each time")
      ->capture_default_str();
  app.add_option("--only", settings.only, "the seed of one problem, as a failure prints it");
  app.add_option("--kernel", settings.kernels, "check only these kernels: one,another")
      ->delimiter(',')
      ->check(CLI::IsMember(all_kernels()));
  app.add_option(
         "--domain", settings.domain,
         "the problems: attention's whole contract, or problems for wgmma (forward, with block masks, "
         "with masks, in f32, backward without and with features), for mma (backward, in f32) or for "
         "plain kernels, which only know a band (at usual head dims or at 257 to 512); or gemm, ffn, norm, "
         "rope and layers")
      ->check(CLI::IsMember({"whole", "wgmma", "wgmma-blocks", "wgmma-masks", "wgmma-f32", "wgmma-backward",
                             "wgmma-features", "mma", "mma-f32", "plain", "wide-heads", "wide-f32",
                             "operations"}))
      ->capture_default_str();
  app.add_option(
         "--rule", settings.rule,
         "the precision to ask for. f16 and bf16 may have twice the errors of PyTorch in f32 (strict), "
         "or of PyTorch with 16-bit products (standard, except for kernels that compute in f32)")
      ->check(CLI::IsMember({"strict", "standard"}))
      ->capture_default_str();
  app.add_option("--level", settings.level, "check the CPU kernels only at this SIMD level")
      ->check(CLI::IsMember(strings(simd_levels())));
  app.add_option("--threads", settings.threads, "number of threads")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--cuda", settings.cuda, "check the CUDA kernels, on the first device");
  app.add_flag("--pieces", settings.pieces,
               "cut every problem into pieces of a whole, and join their results (CUDA kernels only)");
  app.add_flag("--verbose", settings.verbose, "print every problem");
  app.add_flag("--self-test", settings.self_test, "only check that wrong kernels are found");
  app.add_flag("--no-self-test", settings.no_self_test,
               "leave the self-test to another process of the same run");
  CLI11_PARSE(app, argc, argv);
  try {
    if (const CudaPresence cuda = cuda_presence(); settings.cuda && !cuda.present) {
      std::cerr << "no CUDA kernels can be checked here: " << cuda.reason << '\n';
      return 1;
    }
    if (settings.only.empty() && !settings.no_self_test && !self_test()) return 1;
    return settings.self_test ? 0 : run(settings);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
