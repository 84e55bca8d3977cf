#pragma once

#include <cstdint>
#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tilewise {

/// All kernels in order of preference, and for each whether it was chosen, could compute the call, or cannot.
struct Explanation {
  enum class Verdict : std::uint8_t { chosen, able, unable };
  struct Entry {
    std::string kernel;
    Verdict verdict;
    std::string reason;  ///< why it cannot, why it leaves the problem to a later kernel, or what is on trial
  };
  std::string problem;
  std::vector<Entry> entries;
};
std::string to_string(const Explanation& explanation);

}  // namespace tilewise
#pragma GCC visibility pop
