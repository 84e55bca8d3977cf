#pragma once

namespace tilewise::test {

/// Runs deliberately wrong kernels and prints which faults were found. Returns false if one was missed.
bool self_test();

}  // namespace tilewise::test
