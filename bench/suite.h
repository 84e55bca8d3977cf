#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace tilewise::bench {

/// What the command line asks in place of a suite's own choices; an empty list leaves them as they are.
struct Selection {
  std::vector<DType> dtypes;
  std::vector<Pass> passes;
  std::vector<bool> causal;
};

/// Problems of the suite with this name, or in this file. Throws InvalidArgument where there is none or where
/// it cannot be read.
///
/// A suite is {"about": text, "rows": [row, …]}. A row has sizes b, hq, hkv, sq, sk, d, dv (hkv, sk and dv
/// follow hq, sq and d; b is 1), features (mask "additive" or "padding", window, blocks, dropout), and lists
/// of dtypes, passes, causal and deterministic, which are multiplied out; without them it is f32, forward,
/// not causal, not deterministic.
std::vector<Problem> load_suite(const std::string& name_or_file, const Selection& selection);

/// The problems of one row written as "hq=8 sq=1024 d=64 window=256".
std::vector<Problem> parse_shape(const std::string& text, const Selection& selection);

/// Names of the suites that come with the benchmark.
std::vector<std::string> suite_names();

/// "f32" → DType::f32; throws InvalidArgument otherwise. Likewise the pass.
DType parse_dtype(const std::string& name);
Pass parse_pass(const std::string& name);

}  // namespace tilewise::bench
