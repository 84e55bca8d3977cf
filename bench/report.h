#pragma once

#include <fstream>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "runner.h"

namespace tilewise::bench {

/// The machine and the build, as measured or read at the start of the run.
struct Environment {
  std::string cpu;
  std::vector<std::string> simd_levels;
  int threads = 1;
  std::string compiler;
  std::string version;
  std::string fma_instructions;
  std::map<int, double> peak_gflops;  ///< by threads
  std::map<int, double> copy_gbps;
};
Environment inspect(const std::vector<int>& thread_counts);

/// Writes JSON lines, the environment first. Every line is flushed before the next measurement.
class JsonLines {
 public:
  /// Throws InvalidArgument if the file cannot be written.
  JsonLines(const std::string& file, const Environment& environment);
  void add(const Measurement& measurement);

 private:
  std::ofstream stream_;
};

void print_environment(std::ostream& out, const Environment& environment);
/// Prints one line per measurement, and below them the range of the peak over the run.
void print_table(std::ostream& out, const Environment& environment,
                 const std::vector<Measurement>& measurements);

}  // namespace tilewise::bench
