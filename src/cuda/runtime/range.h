#pragma once

namespace tilewise::cuda {

/// A named range in a profile.
class Range {
 public:
  explicit Range(const char* name);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace tilewise::cuda
