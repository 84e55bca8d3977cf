#pragma once

#include <cstdint>
#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tilewise {

/// Each kernel in order of preference: chosen, able, or why not.
struct Explanation {
  enum class Verdict : std::uint8_t { chosen, able, unable };
  struct Entry {
    std::string kernel;
    Verdict verdict;
    std::string reason;  ///< why it is unable or leaves the problem to a later kernel, or what is on trial
  };
  std::string problem;
  std::vector<Entry> entries;
};
std::string to_string(const Explanation& explanation);

}  // namespace tilewise
#pragma GCC visibility pop
