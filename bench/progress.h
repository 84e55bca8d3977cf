#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "problem.h"

namespace tilewise::bench {

/// Says on stderr which row runs, how many there are and how long the rest may take: in place on a terminal,
/// otherwise as a line now and then.
class Progress {
 public:
  Progress(std::size_t total, double seconds_per_row, bool quiet);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void begin(const Problem& problem, int threads);
  void end() { ++done_; }
  /// Takes the line off the terminal.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  double seconds_left() const;

  std::size_t total_;
  std::size_t done_ = 0;
  double seconds_per_row_;  // a guess until rows were measured
  bool quiet_;
  bool terminal_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_line_{};
};

}  // namespace tilewise::bench
