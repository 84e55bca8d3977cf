#pragma once

namespace tilewise::test {

/// Runs kernels that are wrong on purpose and prints which faults were found. False when one was missed.
bool self_test();

}  // namespace tilewise::test
