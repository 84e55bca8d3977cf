#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "problem.h"

namespace tilewise::bench {

struct Settings {
  std::vector<std::string> kernels;
  std::string level;             ///< SIMD level; empty: the best one
  double min_seconds = 0.5;      ///< least measured time per kernel of a row
  double reference_gflop = 0.5;  ///< largest problem of the reference, which is slow
  std::function<bool()> stop;    ///< called between rounds
};

/// The measurement of one kernel on one problem.
struct Measurement {
  Problem problem;
  std::string kernel;
  std::string level;
  int threads = 1;
  std::string skipped{};  ///< why there are no figures, or empty

  int rounds = 0;
  double ms = 0;         ///< median
  double ms_min = 0;     ///< the fastest round
  double spread = 0;     ///< (upper quartile − lower quartile) / median
  double cpu_share = 0;  ///< share of the time in which the calling thread had a core
  double gflops = 0;
  double gbps = 0;
  double peak_mb = 0;             ///< memory of workspace and results
  double peak_gflops = 0;         ///< of the machine, measured just before and after
  double percent_of_peak = 0;     ///< of peak_gflops
  std::optional<double> error{};  ///< largest absolute error of the sampled rows
};

/// Measures every kernel on the problem: first a call whose results are checked, then rounds in which each
/// kernel runs once. If the run is stopped before there are enough rounds, kernels are missing from the
/// result.
std::vector<Measurement> measure(const Problem& problem, int threads, const Settings& settings);

}  // namespace tilewise::bench
