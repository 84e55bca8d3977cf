#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

// What the emulated runtime keeps for the emulator.

namespace tilewise::emulator {

bool capturing(void* stream);
/// Adds to the graph that is captured from a stream.
void record(void* stream, std::function<void()> work);

/// What went wrong in a kernel, for the next call. Empty where nothing did; taken once.
void report_fault(const std::string& what);
std::string take_fault();

/// The most shared memory that a block may have on the emulated device.
std::size_t most_shared_bytes();

/// What is in a CUtensorMap of the emulated driver.
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
