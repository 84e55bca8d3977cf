#include <string>
#include <vector>

#include "attention/validate.h"
#include "attention/views.h"
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

// A set of key blocks, for one row of query blocks at a time.
class BlockSet {
 public:
  explicit BlockSet(std::int64_t key_blocks) : has_(static_cast<std::size_t>(key_blocks)) {}

  bool has(std::int32_t block) const { return has_[static_cast<std::size_t>(block)]; }
  void add(std::int32_t block) { has_[static_cast<std::size_t>(block)] = true; }
  void remove(std::int32_t block) { has_[static_cast<std::size_t>(block)] = false; }

 private:
  std::vector<bool> has_;
};

// One row of query blocks in one of the lists.
struct BlockRow {
  const Indices& indices;
  std::int64_t b, h, row;
  std::int32_t count;

  std::int32_t at(std::int32_t slot) const { return indices.at(b, h, row, slot); }
  std::string place() const {
    return "row " + std::to_string(row) + " of batch entry " + std::to_string(b) + ", head " +
           std::to_string(h);
  }
  void remove_from(BlockSet& set) const {
    for (std::int32_t slot = 0; slot < count; ++slot) set.remove(at(slot));
  }
};

constexpr std::string_view once = "each key block at most once in a row of query blocks";

void check_block_list(const Tensor& counts, const Tensor& indices, std::string_view name,
                      std::int64_t key_blocks, BlockSet& listed) {
  const Indices count = indices_of(counts), index = indices_of(indices);
  check(
      counts.extent(0) == indices.extent(0) && counts.extent(1) == indices.extent(1), name,
      [&] { return "the leading extents of its counts, " + shape_string(counts); }, indices);
  for (std::int64_t b = 0; b < counts.extent(0); ++b) {
    for (std::int64_t h = 0; h < counts.extent(1); ++h) {
      for (std::int64_t qb = 0; qb < counts.extent(2); ++qb) {
        const BlockRow row{index, b, h, qb, count.at(b, h, qb)};
        check(
            row.count >= 0 && row.count <= indices.extent(3), name,
            [&] { return "counts from 0 to its " + std::to_string(indices.extent(3)) + " slots"; },
            row.count);
        for (std::int32_t slot = 0; slot < row.count; ++slot) {
          const std::int32_t block = row.at(slot);
          check(
              block >= 0 && block < key_blocks, name,
              [&] { return "key blocks from 0 to " + std::to_string(key_blocks - 1); }, block);
          check(!listed.has(block), name, once,
                [&] { return "block " + std::to_string(block) + " twice in " + row.place(); });
          listed.add(block);
        }
        row.remove_from(listed);
      }
    }
  }
}

// No block in both lists, which may broadcast over different dimensions.
void check_lists_apart(const BlockMask& blocks, const BlockView& view, BlockSet& listed) {
  const auto extent = [&](int dim) {
    const std::int64_t some = blocks.counts.extent(dim), full = blocks.full_counts.extent(dim);
    return some == 1 ? full : some;
  };
  for (std::int64_t b = 0; b < extent(0); ++b) {
    for (std::int64_t h = 0; h < extent(1); ++h) {
      for (std::int64_t qb = 0; qb < blocks.counts.extent(2); ++qb) {
        const BlockRow some{view.indices, b, h, qb, view.counts.at(b, h, qb)};
        const BlockRow full{view.full_indices, b, h, qb, view.full_counts.at(b, h, qb)};
        if (some.count == 0 || full.count == 0) continue;
        for (std::int32_t slot = 0; slot < some.count; ++slot) listed.add(some.at(slot));
        for (std::int32_t slot = 0; slot < full.count; ++slot) {
          check(!listed.has(full.at(slot)), "blocks.full_indices", once, [&] {
            return "block " + std::to_string(full.at(slot)) + ", which blocks.indices lists too, in " +
                   full.place();
          });
        }
        some.remove_from(listed);
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
                     inputs.packed.max_length_q);
    check_cumulative(call.cumulative_k, "packed.cumulative_k", problem.batch, inputs.k.extent(0),
                     inputs.packed.max_length_k);
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
    const BlockMask& blocks = inputs.blocks;
    BlockSet listed(call.key_blocks());
    check_block_list(blocks.counts, blocks.indices, "blocks.indices", call.key_blocks(), listed);
    if (blocks.full_counts.given()) {
      check_block_list(blocks.full_counts, blocks.full_indices, "blocks.full_indices", call.key_blocks(),
                       listed);
      check_lists_apart(blocks, call.blocks, listed);
    }
    if (blocks.tile_ids.given()) check_tile_ids(blocks);
  }
}

}  // namespace tilewise
