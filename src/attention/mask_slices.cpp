#include <algorithm>
#include <string>
#include <string_view>

#include "core/check.h"
#include "tilewise/masks.h"

namespace tilewise::masks {
namespace {

constexpr std::int64_t most_positions = (std::int64_t{1} << 31) - 1;  // the limit of attention

void check_length(std::int64_t length, std::string_view name) {
  check(length >= 0 && length <= most_positions, name, "0 or above and below 2^31", length);
}

MaskSlice causal_square(std::int64_t begin, std::int64_t end) {
  return {.q_begin = begin, .q_end = end, .k_begin = begin, .k_end = end, .highest = 0};
}

// The slices of neighbourhoods along a line, with queries from `q` on and keys from `k` on. The box of point
// i begins at i − before, clamped so that it stays inside the line. So there are three slices: the points at
// the beginning, which share the first box, the points in between, and the points at the end, which share the
// last box.
void add_line(std::int64_t q, std::int64_t k, std::int64_t extent, std::int64_t kernel,
              std::vector<MaskSlice>& slices) {
  const std::int64_t before = kernel / 2;
  const std::int64_t inner_begin = std::min(before + 1, extent);  // before it, all points have the first box
  const std::int64_t inner_end = std::max(inner_begin, extent - kernel + before);
  slices.push_back({.q_begin = q, .q_end = q + inner_begin, .k_begin = k, .k_end = k + kernel});
  if (inner_begin < inner_end) {
    slices.push_back({.q_begin = q + inner_begin,
                      .q_end = q + inner_end,
                      .k_begin = k,
                      .k_end = k + extent,
                      .lowest = k - q - before,
                      .highest = k - q - before + kernel - 1});
  }
  if (inner_end < extent) {
    slices.push_back(
        {.q_begin = q + inner_end, .q_end = q + extent, .k_begin = k + extent - kernel, .k_end = k + extent});
  }
}

// The slices of neighbourhoods over the dimensions from `dim` on. The innermost dimension is a line.
void add_neighbours(std::size_t dim, std::int64_t q, std::int64_t k, std::span<const std::int64_t> extents,
                    std::span<const std::int64_t> kernel, std::vector<MaskSlice>& slices) {
  const std::int64_t extent = extents[dim];
  if (dim + 1 == extents.size()) return add_line(q * extent, k * extent, extent, kernel[dim], slices);
  for (std::int64_t point = 0; point < extent; ++point) {
    const std::int64_t first = std::clamp<std::int64_t>(point - kernel[dim] / 2, 0, extent - kernel[dim]);
    for (std::int64_t other = first; other < first + kernel[dim]; ++other) {
      add_neighbours(dim + 1, q * extent + point, k * extent + other, extents, kernel, slices);
    }
  }
}

}  // namespace

std::vector<MaskSlice> documents(std::span<const std::int64_t> lengths, bool causal) {
  std::vector<MaskSlice> slices;
  slices.reserve(lengths.size());
  std::int64_t begin = 0;
  for (const std::int64_t length : lengths) {
    check_length(length, "lengths");
    const std::int64_t end = begin + length;
    check_length(end, "lengths");
    slices.push_back(causal ? causal_square(begin, end)
                            : MaskSlice{.q_begin = begin, .q_end = end, .k_begin = begin, .k_end = end});
    begin = end;
  }
  return slices;
}

std::vector<MaskSlice> prefix(std::int64_t length, std::int64_t prefix) {
  check_length(length, "length");
  check(
      prefix >= 0 && prefix <= length, "prefix",
      [&] { return "a number from 0 to the length, " + std::to_string(length); }, prefix);
  return {{.q_begin = 0, .q_end = length, .k_begin = 0, .k_end = prefix}, causal_square(prefix, length)};
}

std::vector<MaskSlice> shared_prompt(std::int64_t prompt, std::span<const std::int64_t> responses) {
  check_length(prompt, "prompt");
  std::vector<MaskSlice> slices = {causal_square(0, prompt)};
  slices.reserve(1 + 2 * responses.size());
  std::int64_t begin = prompt;
  for (const std::int64_t length : responses) {
    check_length(length, "responses");
    const std::int64_t end = begin + length;
    check_length(end, "responses");
    slices.push_back({.q_begin = begin, .q_end = end, .k_begin = 0, .k_end = prompt});
    slices.push_back(causal_square(begin, end));
    begin = end;
  }
  return slices;
}

std::vector<MaskSlice> block_causal(std::int64_t length, std::int64_t block) {
  check_length(length, "length");
  check(block >= 1, "block", "1 or above", block);
  std::vector<MaskSlice> slices;
  for (std::int64_t begin = 0; begin < length;) {
    const std::int64_t end = block < length - begin ? begin + block : length;
    slices.push_back({.q_begin = begin, .q_end = end, .k_begin = 0, .k_end = end});
    begin = end;
  }
  return slices;
}

std::vector<MaskSlice> neighbourhood(std::span<const std::int64_t> extents,
                                     std::span<const std::int64_t> kernel) {
  check(!extents.empty(), "extents", "at least one", "none");
  check(
      kernel.size() == extents.size(), "kernel",
      [&] { return "as many numbers as extents, " + std::to_string(extents.size()); }, kernel.size());
  std::int64_t points = 1;
  for (std::size_t dim = 0; dim < extents.size(); ++dim) {
    check(extents[dim] >= 1 && extents[dim] <= most_positions / points, "extents",
          "1 or above, and fewer than 2^31 points in total", extents[dim]);
    points *= extents[dim];
    check(
        kernel[dim] >= 1 && kernel[dim] <= extents[dim], "kernel",
        [&] { return "a number from 1 to the extent, " + std::to_string(extents[dim]); }, kernel[dim]);
  }
  std::vector<MaskSlice> slices;
  add_neighbours(0, 0, 0, extents, kernel, slices);
  return slices;
}

}  // namespace tilewise::masks
