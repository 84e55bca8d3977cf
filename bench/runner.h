#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "problem.h"

namespace tilewise::bench {

struct Settings {
  std::vector<std::string> kernels;
  std::string level;             ///< SIMD level; empty is the best one
  double min_seconds = 0.5;      ///< of measured time for each kernel of a row
  double reference_gflop = 0.5;  ///< the reference, which is slow, takes no larger problem
  std::function<bool()> stop;    ///< asked between rounds
};

/// One kernel on one problem.
struct Measurement {
  Problem problem;
  std::string kernel;
  std::string level;
  int threads = 1;
  std::string skipped{};  ///< why there are no figures, or empty

  int rounds = 0;
  double ms = 0;      ///< median
  double ms_min = 0;  ///< the fastest round
  double spread = 0;  ///< (upper quartile − lower quartile) / median
  double cpu_share =
      0;  ///< of the time, what the calling thread had a core for; less than 1 on a busy machine
  double gflops = 0;
  double gbps = 0;
  double peak_mb = 0;             ///< workspace and results
  double peak_gflops = 0;         ///< of the machine, measured right before and after
  double percent_of_peak = 0;     ///< of that
  std::optional<double> error{};  ///< largest absolute one among sampled rows
};

/// Every kernel on the problem: a checked call to warm up, then rounds in which each runs once in turn. Empty
/// when it was stopped before there were enough rounds.
std::vector<Measurement> measure(const Problem& problem, int threads, const Settings& settings);

}  // namespace tilewise::bench
