#include "progress.h"

#include <unistd.h>

#include <cmath>
#include <iostream>
#include <sstream>

namespace tilewise::bench {
namespace {

constexpr const char* erase_line = "\r\033[K";
constexpr std::chrono::seconds between_lines{10};

std::string duration(double seconds) {
  const auto whole = static_cast<long>(std::ceil(seconds));
  std::ostringstream text;
  if (whole >= 60) text << whole / 60 << " min ";
  text << whole % 60 << " s";
  return text.str();
}

}  // namespace

Progress::Progress(std::size_t total, double seconds_per_row, bool quiet)
    : total_(total),
      seconds_per_row_(seconds_per_row),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) == 1) {}

double Progress::seconds_left() const {
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  const double per_row = done_ == 0 ? seconds_per_row_ : elapsed / static_cast<double>(done_);
  return per_row * static_cast<double>(total_ - done_);
}

void Progress::begin(const Problem& problem, int threads) {
  if (quiet_) return;
  const Clock::time_point now = Clock::now();
  if (!terminal_ && done_ != 0 && now - last_line_ < between_lines) return;
  last_line_ = now;
  std::ostringstream line;
  line << '[' << done_ + 1 << '/' << total_ << "] " << problem.name << ' ' << to_string(problem.dtype) << ' '
       << describe(problem.pass) << (problem.causal ? " causal, " : ", ") << threads
       << (threads == 1 ? " thread" : " threads") << ", about " << duration(seconds_left()) << " left";
  std::cerr << (terminal_ ? erase_line : "") << line.str() << (terminal_ ? "" : "\n") << std::flush;
}

void Progress::clear() {
  if (!quiet_ && terminal_) std::cerr << erase_line << std::flush;
}

}  // namespace tilewise::bench
