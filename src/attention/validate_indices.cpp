#include "attention/validate.h"
#include "core/check.h"

namespace tilewise {
namespace {

std::string at(std::int64_t index, std::int64_t value) {
  return std::to_string(value) + " at index " + std::to_string(index);
}

void check_cumulative(const Indices& cumulative, std::string_view name, std::int64_t sequences,
                      std::int64_t total, std::int64_t longest) {
  check(cumulative.at(0) == 0, name, "a start at 0", cumulative.at(0));
  for (std::int64_t n = 0; n < sequences; ++n) {
    const std::int64_t length = std::int64_t{cumulative.at(n + 1)} - cumulative.at(n);
    check(length >= 0, name, "lengths that do not decrease", at(n + 1, cumulative.at(n + 1)));
    check(
        length <= longest, name,
        [&] { return "sequences of at most the maximum length " + std::to_string(longest); }, at(n, length));
  }
  check(
      cumulative.at(sequences) <= total, name,
      [&] { return "an end of at most " + std::to_string(total) + " rows"; }, cumulative.at(sequences));
}

void check_block_list(const Tensor& counts, const Tensor& indices, std::string_view name,
                      std::int64_t key_blocks) {
  const Indices count = {.data = static_cast<const std::int32_t*>(counts.data),
                         .stride = {counts.stride(0), counts.stride(1), counts.stride(2), 0}};
  const Indices index = {
      .data = static_cast<const std::int32_t*>(indices.data),
      .stride = {indices.stride(0), indices.stride(1), indices.stride(2), indices.stride(3)}};
  check(
      counts.extent(0) == indices.extent(0) && counts.extent(1) == indices.extent(1), name,
      [&] { return "the leading extents of its counts, " + shape_string(counts); }, indices);
  for (std::int64_t b = 0; b < counts.extent(0); ++b) {
    for (std::int64_t h = 0; h < counts.extent(1); ++h) {
      for (std::int64_t qb = 0; qb < counts.extent(2); ++qb) {
        const std::int32_t n = count.at(b, h, qb);
        check(
            n >= 0 && n <= indices.extent(3), name,
            [&] { return "counts from 0 to its " + std::to_string(indices.extent(3)) + " slots"; }, n);
        for (std::int32_t slot = 0; slot < n; ++slot) {
          const std::int32_t block = index.at(b, h, qb, slot);
          check(
              block >= 0 && block < key_blocks, name,
              [&] { return "key blocks from 0 to " + std::to_string(key_blocks - 1); }, block);
        }
      }
    }
  }
}

void check_tile_ids(const BlockMask& blocks) {
  const Tensor& ids = blocks.tile_ids;
  const Tensor& counts = blocks.counts;
  check(
      ids.extent(0) == counts.extent(0) && ids.extent(1) == counts.extent(1), "blocks.tile_ids",
      [&] { return "the leading extents of counts, " + shape_string(counts); }, ids);
  const auto* count = static_cast<const std::int32_t*>(counts.data);
  const auto* id = static_cast<const std::int32_t*>(ids.data);
  for (std::int64_t b = 0; b < ids.extent(0); ++b) {
    for (std::int64_t h = 0; h < ids.extent(1); ++h) {
      for (std::int64_t qb = 0; qb < ids.extent(2); ++qb) {
        const std::int32_t n = count[b * counts.stride(0) + h * counts.stride(1) + qb * counts.stride(2)];
        for (std::int32_t slot = 0; slot < n; ++slot) {
          const std::int32_t tile =
              id[b * ids.stride(0) + h * ids.stride(1) + qb * ids.stride(2) + slot * ids.stride(3)];
          check(
              tile >= 0 && tile < blocks.tiles.extent(0), "blocks.tile_ids",
              [&] { return "ids from 0 to " + std::to_string(blocks.tiles.extent(0) - 1); }, tile);
        }
      }
    }
  }
}

}  // namespace

void check_indices(const AttentionInputs& inputs, const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  if (problem.layout == Layout::packed) {
    check_cumulative(call.cumulative_q, "packed.cumulative_q", problem.batch, inputs.q.extent(0),
                     problem.length_q);
    check_cumulative(call.cumulative_k, "packed.cumulative_k", problem.batch, inputs.k.extent(0),
                     problem.length_k);
  }
  if (problem.features.key_lengths) {
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const std::int32_t length = call.key_lengths.at(b);
      check(
          length >= 0 && length <= problem.length_k, "key_lengths",
          [&] { return "lengths from 0 to " + std::to_string(problem.length_k); }, at(b, length));
      if (problem.layout != Layout::paged) continue;
      for (std::int64_t slot = 0; slot * call.page < length; ++slot) {
        const std::int32_t page = call.page_table.at(b, slot);
        check(
            page >= 0 && page < inputs.k.extent(0), "page_table",
            [&] { return "page ids from 0 to " + std::to_string(inputs.k.extent(0) - 1); }, page);
      }
    }
  }
  if (problem.features.block_mask) {
    check_block_list(inputs.blocks.counts, inputs.blocks.indices, "blocks.indices", call.key_blocks());
    if (inputs.blocks.full_counts.given()) {
      check_block_list(inputs.blocks.full_counts, inputs.blocks.full_indices, "blocks.full_indices",
                       call.key_blocks());
    }
    if (inputs.blocks.tile_ids.given()) check_tile_ids(inputs.blocks);
  }
}

}  // namespace tilewise
