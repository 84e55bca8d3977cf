#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "problem.h"

namespace tilewise::bench {

/// Reports on stderr which row runs, how many rows there are and how long the remaining ones may take. On a
/// terminal it updates one line, otherwise it prints a line every few seconds.
class Progress {
 public:
  Progress(std::size_t total, double seconds_per_row, bool quiet);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void begin(const Problem& problem, int threads);
  void end() { ++done_; }
  /// Erases the line on the terminal.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  double seconds_left() const;

  std::size_t total_;
  std::size_t done_ = 0;
  double seconds_per_row_;  // an estimate until a row was measured
  bool quiet_;
  bool terminal_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_line_{};
};

}  // namespace tilewise::bench
