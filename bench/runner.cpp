#include "runner.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <iomanip>
#include <memory>
#include <sstream>

#include "machine.h"
#include "operands.h"
#include "oracle.h"

namespace tilewise::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t least_rounds = 5;
constexpr std::size_t most_rounds = 2000;
constexpr double least_sample_seconds = 5e-4;  // of shorter calls, several are timed together

// Elapsed time, and the part of it in which the calling thread had a core.
struct Seconds {
  double wall = 0;
  double cpu = 0;
};

double thread_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

Seconds seconds_of(const std::function<void()>& call, int calls) {
  const double cpu = thread_cpu_seconds();
  const Clock::time_point start = Clock::now();
  for (int n = 0; n < calls; ++n) call();
  const double wall = std::chrono::duration<double>(Clock::now() - start).count();
  return {wall, thread_cpu_seconds() - cpu};
}

// A kernel that is measured, with everything that its calls need.
struct Entrant {
  Measurement measurement;
  std::unique_ptr<std::byte[]> workspace;
  std::function<void()> call;
  int calls_per_sample = 1;
  std::vector<double> samples;  // seconds per call
  Seconds total;

  bool done(double min_seconds) const {
    if (!measurement.skipped.empty() || samples.size() >= most_rounds) return true;
    return samples.size() >= least_rounds && total.wall >= min_seconds;
  }
};

// A quantile of sorted samples, with linear interpolation.
double quantile(const std::vector<double>& sorted, double q) {
  const double place = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (place - std::floor(place)) * (sorted[above] - sorted[below]);
}

Context context_for(int threads, const Settings& settings) {
  Context context;
  context.parallel_for = threads == 1 ? serial_parallel_for() : openmp_parallel_for(threads);
  context.simd_level = settings.level;
  return context;
}

// Why the kernel is not measured; empty if it is.
std::string reason_to_skip(const Problem& problem, const std::string& kernel, const Operands& operands,
                           const Context& context, const Settings& settings) {
  const Explanation explanation =
      problem.pass == Pass::forward
          ? explain_attention_forward(operands.inputs, operands.options, operands.outputs, context)
          : explain_attention_backward(operands.inputs, operands.options, operands.gradients, context);
  for (const Explanation::Entry& entry : explanation.entries) {
    if (entry.kernel == kernel && entry.verdict == Explanation::Verdict::unable) return entry.reason;
  }
  const double gflop = useful_flops(problem) * 1e-9;
  if (kernel == "reference" && gflop > settings.reference_gflop) {
    std::ostringstream text;
    text << std::setprecision(3) << gflop << " GFLOP, more than --reference-limit "
         << settings.reference_gflop;
    return text.str();
  }
  return {};
}

// Gives the entrant its own workspace and a call that runs the kernel. `kernel` refers to a string of the
// settings, which outlives the call.
void prepare(Entrant& entrant, std::string_view kernel, const Operands& operands, const Context& context) {
  const bool forward = entrant.measurement.problem.pass == Pass::forward;
  AttentionOptions options = operands.options;
  options.kernel = kernel;
  const std::size_t bytes =
      forward ? attention_forward_workspace(operands.inputs, options, operands.outputs, context)
              : attention_backward_workspace(operands.inputs, options, operands.gradients, context);
  entrant.workspace = std::make_unique<std::byte[]>(bytes);
  entrant.measurement.peak_mb =
      static_cast<double>(bytes + operands.result_bytes(entrant.measurement.problem.pass)) * 1e-6;
  Context own = context;
  own.workspace = {entrant.workspace.get(), bytes};
  entrant.call = [&operands, options, own, forward] {
    if (forward) {
      attention_forward(operands.inputs, options, operands.outputs, own);
    } else {
      attention_backward(operands.inputs, options, operands.gradients, own);
    }
  };
}

// Computes O and LSE, which backward reads.
void compute_forward(const Operands& operands, Context context, const std::string& kernel) {
  AttentionOptions options = operands.options;
  options.kernel = kernel;
  const std::size_t bytes = attention_forward_workspace(operands.inputs, options, operands.outputs, context);
  const auto workspace = std::make_unique<std::byte[]>(bytes);
  context.workspace = {workspace.get(), bytes};
  attention_forward(operands.inputs, options, operands.outputs, context);
}

// Makes a first call, checks its results, and derives from its time how many calls make a sample.
void warm_up(Entrant& entrant, Operands& operands) {
  Measurement& measurement = entrant.measurement;
  operands.spoil_results(measurement.problem.pass);
  double seconds = seconds_of(entrant.call, 1).wall;
  const double error = sampled_error(measurement.problem, operands);
  measurement.error = error;
  if (std::isnan(error)) measurement.skipped = "WRONG: the result has NaN";
  if (seconds < 0.1) seconds = std::min(seconds, seconds_of(entrant.call, 1).wall);
  entrant.calls_per_sample =
      static_cast<int>(std::clamp(std::ceil(least_sample_seconds / seconds), 1.0, 1000.0));
}

void summarise(Entrant& entrant, double peak_gflops) {
  Measurement& m = entrant.measurement;
  std::vector<double>& samples = entrant.samples;
  std::sort(samples.begin(), samples.end());
  const double median = quantile(samples, 0.5);
  m.rounds = static_cast<int>(samples.size());
  m.ms = median * 1e3;
  m.ms_min = samples.front() * 1e3;
  m.spread = (quantile(samples, 0.75) - quantile(samples, 0.25)) / median;
  m.cpu_share = entrant.total.cpu / entrant.total.wall;
  m.gflops = useful_flops(m.problem) / median * 1e-9;
  m.gbps = compulsory_bytes(m.problem) / median * 1e-9;
  m.peak_gflops = peak_gflops;
  m.percent_of_peak = 100 * m.gflops / peak_gflops;
}

std::string level_of(const std::string& kernel, const Settings& settings) {
  if (kernel != "simd") return {};
  if (!settings.level.empty()) return settings.level;
  const std::vector<std::string_view> levels = simd_levels();
  return levels.empty() ? std::string() : std::string(levels.front());
}

std::vector<Entrant> entrants_for(const Problem& problem, int threads, Operands& operands,
                                  const Context& context, const Settings& settings) {
  std::vector<Entrant> entrants;
  bool have_forward = problem.pass == Pass::forward;
  for (const std::string& kernel : settings.kernels) {
    Entrant& entrant = entrants.emplace_back();
    entrant.measurement = {
        .problem = problem, .kernel = kernel, .level = level_of(kernel, settings), .threads = threads};
    std::string& skipped = entrant.measurement.skipped;
    skipped = reason_to_skip(problem, kernel, operands, context, settings);
    if (!skipped.empty()) continue;
    try {
      if (!have_forward) compute_forward(operands, context, kernel);
      have_forward = true;
      prepare(entrant, kernel, operands, context);
      warm_up(entrant, operands);
    } catch (const Unsupported& error) {
      skipped = error.what();
    }
  }
  return entrants;
}

}  // namespace

std::vector<Measurement> measure(const Problem& problem, int threads, const Settings& settings) {
  Operands operands(problem);
  const Context context = context_for(threads, settings);
  std::vector<Entrant> entrants = entrants_for(problem, threads, operands, context, settings);
  const auto all_done = [&] {
    return std::all_of(entrants.begin(), entrants.end(),
                       [&](const Entrant& entrant) { return entrant.done(settings.min_seconds); });
  };
  const bool any = !all_done();

  double peak = any ? fma_peak_gflops(threads) : 0;
  while (!all_done() && !settings.stop()) {
    for (Entrant& entrant : entrants) {
      if (entrant.done(settings.min_seconds)) continue;
      const Seconds seconds = seconds_of(entrant.call, entrant.calls_per_sample);
      entrant.samples.push_back(seconds.wall / entrant.calls_per_sample);
      entrant.total.wall += seconds.wall;
      entrant.total.cpu += seconds.cpu;
    }
  }
  if (any) peak = std::max(peak, fma_peak_gflops(threads));

  std::vector<Measurement> measurements;
  for (Entrant& entrant : entrants) {
    const bool ran = entrant.measurement.skipped.empty();
    if (ran && entrant.samples.size() < least_rounds) continue;
    if (ran) summarise(entrant, peak);
    measurements.push_back(std::move(entrant.measurement));
  }
  return measurements;
}

}  // namespace tilewise::bench
