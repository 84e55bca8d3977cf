#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

// The functions of the emulated runtime that the emulator calls.

namespace tilewise::emulator {

bool capturing(void* stream);
/// Adds work to the graph that is being captured from the stream.
void record(void* stream, std::function<void()> work);

/// Report a fault of a kernel, and take it in the next call. Empty if there is none; a fault is taken once.
void report_fault(const std::string& what);
std::string take_fault();

/// The most shared memory that a block may have on the emulated device.
std::size_t most_shared_bytes();

/// The contents of a CUtensorMap of the emulated driver.
struct TensorMap {
  const void* data;
  std::uint64_t extents[5];
  std::uint64_t strides[4];
  std::uint32_t box[5];
  std::uint16_t swizzle;
  std::uint8_t rank, element_bytes;
};
TensorMap tensor_map(const void* map);

}  // namespace tilewise::emulator
