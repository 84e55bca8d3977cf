#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fuzz/call.h"

namespace tilewise::fuzz {

/// Takes the elements of all arguments out of the memory they were drawn in, and gives arguments addresses of
/// their own. Those that shared memory still do, in the same way. False where one is too large.
bool take_contents(Call& call);

/// The bytes a view claims, relative to its first element. Absent where they are too many to be made, or more
/// than numbers can say.
struct Span {
  std::int64_t first = 0;
  std::int64_t end = 0;
};
std::optional<Span> span_of(const Tensor& view);

/// Whether a view has no elements. Its rank and extents may be anything.
bool is_empty(const Tensor& view);

/// Whether two elements of a tensor that has memory are the same number.
bool has_repeated_element(const Tensor& view);

/// Memory for the arguments of a call, exactly as large as their views claim: a sanitizer sees an access one
/// byte beyond. While it lives, the views of the call point into it. `variant` decides what stands in outputs
/// and in the gaps between rows.
class Memory {
 public:
  Memory(Call& call, std::uint64_t variant);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  /// The name of an argument beside which a byte was written that is no element of an output; or, where
  /// nothing may be written, any byte. Empty where there is none.
  std::string damage(bool may_write) const;

  /// The elements of all outputs.
  std::vector<std::byte> results() const;

 private:
  struct Block;
  void place(std::vector<Argument*> placed, std::uint64_t variant);

  Call& call_;
  std::vector<Block> blocks_;
};

/// A workspace of exactly that size, full of something, one byte past an aligned address.
class ScratchMemory {
 public:
  ScratchMemory(std::size_t bytes, std::uint64_t variant);
  ~ScratchMemory();
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  void* memory_;
  std::byte* data_;
};

}  // namespace tilewise::fuzz
