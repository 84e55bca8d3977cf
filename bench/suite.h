#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace tilewise::bench {

/// Choices of the command line that replace those of a suite. An empty list keeps the suite's.
struct Selection {
  std::vector<DType> dtypes;
  std::vector<Pass> passes;
  std::vector<bool> causal;
};

/// The problems of the suite with this name, or in this file. Throws InvalidArgument if there is none or it
/// cannot be read.
///
/// A suite is {"about": text, "rows": [row, …]}. A row has sizes b, hq, hkv, sq, sk, d, dv (hkv, sk and dv
/// follow hq, sq and d; b is 1), features (mask "additive" or "padding", window, blocks, dropout), and lists
/// of dtypes, passes, causal and deterministic, all combinations of which are problems. The defaults are f32,
/// forward, not causal and not deterministic.
std::vector<Problem> load_suite(const std::string& name_or_file, const Selection& selection);

/// The problems of one row written as "hq=8 sq=1024 d=64 window=256".
std::vector<Problem> parse_shape(const std::string& text, const Selection& selection);

/// The names of the suites that come with the benchmark.
std::vector<std::string> suite_names();

/// Convert names such as "f32" and "forward". Throw InvalidArgument for unknown names.
DType parse_dtype(const std::string& name);
Pass parse_pass(const std::string& name);

}  // namespace tilewise::bench
