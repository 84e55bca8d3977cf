#pragma once

#include "attention/call.h"
#include "core/index_fault.h"

namespace tilewise {

enum class AttentionRule : std::uint8_t {
  none,
  starts_at_0,  ///< for cumulative lengths, those of keys if `second`; likewise the next three
  never_falls,
  longest,
  ends_inside,
  key_length,
  page,
  block_count,  ///< for the block lists, that of full blocks if `second`; likewise the next two
  key_block,
  listed_once,
  lists_apart,
  tile_id,
};
using AttentionFault = IndexFault<AttentionRule>;

/// The list of one row of query blocks, in one of the two block lists.
struct BlockRow {
  const Indices* indices = nullptr;
  std::int64_t b = 0, h = 0, row = 0;
  std::int32_t count = 0;

  constexpr std::int32_t at(std::int32_t slot) const { return indices->at(b, h, row, slot); }
  friend bool operator==(const BlockRow&, const BlockRow&) = default;
};

/// Finds a block in a row's list by linear search, which needs no memory on the device.
struct SearchedBlocks {
  /// Whether the block is among the first `count` of the row's list.
  constexpr bool has(const BlockRow& row, std::int32_t count, std::int32_t block) const {
    for (std::int32_t slot = 0; slot < count; ++slot) {
      if (row.at(slot) == block) return true;
    }
    return false;
  }
};

/// The index tensors of a call as a sequence of items that can be checked independently: one for each
/// cumulative length of queries and of keys, one for each entry's key length and pages, and one for each row
/// of query blocks in `indices`, in `full_indices`, in both lists together, and in the tile ids.
class AttentionIndices {
 public:
  explicit AttentionIndices(const AttentionCall& call) : call_(call) {
    const AttentionProblem& problem = call.problem;
    // Entries or heads share a row only if both counts and blocks are broadcast over them.
    const auto rows_of = [&](const Indices& counts, const Indices& beside) {
      const auto extent = [&](int dim, std::int64_t all) {
        return counts.stride[dim] == 0 && beside.stride[dim] == 0 ? 1 : all;
      };
      return ListRows{
          extent(0, problem.batch), extent(1, problem.heads_q),
          problem.length_q == 0 ? 0 : (problem.length_q + call.blocks.block_q - 1) / call.blocks.block_q};
    };
    if (call.packed()) cumulative_ = problem.batch + 1;
    if (problem.features.key_lengths) entries_ = problem.batch;
    if (!problem.features.block_mask || problem.batch == 0 || problem.heads_q == 0) return;
    partial_ = rows_of(call.blocks.counts, call.blocks.indices);
    if (call.blocks.full_counts.data != nullptr) {
      full_ = rows_of(call.blocks.full_counts, call.blocks.full_indices);
      both_ = {std::max(partial_.batch, full_.batch), std::max(partial_.heads, full_.heads), partial_.rows};
    }
    if (call.blocks.tile_ids.data != nullptr) tile_ids_ = rows_of(call.blocks.counts, call.blocks.tile_ids);
  }

  std::int64_t items() const {
    return 2 * cumulative_ + entries_ + partial_.count() + full_.count() + both_.count() + tile_ids_.count();
  }

  /// The fault of an item, if any. `blocks` finds blocks in lists: SearchedBlocks or MarkedBlocks.
  template <typename Blocks>
  constexpr AttentionFault fault(std::int64_t item, Blocks& blocks) const {
    if (item < cumulative_) return fault_of(call_.starts_q(), item, false);
    if ((item -= cumulative_) < cumulative_) return fault_of(call_.starts_k(), item, true);
    if ((item -= cumulative_) < entries_) return fault_of_entry(item);
    if ((item -= entries_) < partial_.count()) return fault_of_list(partial_.place(item), false, blocks);
    if ((item -= partial_.count()) < full_.count()) return fault_of_list(full_.place(item), true, blocks);
    if ((item -= full_.count()) < both_.count()) return fault_of_both(both_.place(item), blocks);
    return fault_of_ids(tile_ids_.place(item - both_.count()));
  }

 private:
  /// The different rows of query blocks of a list: one for all entries or heads over which the list is
  /// broadcast.
  struct ListRows {
    std::int64_t batch = 0, heads = 0, rows = 0;
    struct Place {
      std::int64_t b, h, row;
    };
    constexpr std::int64_t count() const { return batch * heads * rows; }
    constexpr Place place(std::int64_t item) const {
      return {item / rows / heads, item / rows % heads, item % rows};
    }
  };

  static constexpr AttentionFault fault_of(const Starts& starts, std::int64_t n, bool of_keys) {
    const std::int64_t own = starts.cumulative.at(n);
    if (n == 0 && own != 0) return {AttentionRule::starts_at_0, of_keys, own};
    if (n == starts.sequences) return {};
    const std::int64_t next = starts.cumulative.at(n + 1);
    if (next < own) return {AttentionRule::never_falls, of_keys, next, {n + 1}};
    if (next > starts.rows) return {AttentionRule::ends_inside, of_keys, next};
    if (next - own > starts.longest) return {AttentionRule::longest, of_keys, next - own, {n}};
    return {};
  }

  constexpr AttentionFault fault_of_entry(std::int64_t b) const {
    const std::int64_t length = call_.key_lengths.at(b);
    if (length < 0 || length > call_.problem.length_k) return {AttentionRule::key_length, false, length, {b}};
    if (call_.problem.layout != Layout::paged) return {};
    for (std::int64_t slot = 0; slot * call_.page < length; ++slot) {
      const std::int32_t page = call_.page_table.at(b, slot);
      if (page < 0 || page >= call_.pages) return {AttentionRule::page, false, page};
    }
    return {};
  }

  template <typename Blocks>
  constexpr AttentionFault fault_of_list(const ListRows::Place& at, bool full, Blocks& blocks) const {
    const BlockView& view = call_.blocks;
    const std::int32_t count = (full ? view.full_counts : view.counts).at(at.b, at.h, at.row);
    if (count < 0 || count > (full ? view.full_slots : view.slots)) {
      return {AttentionRule::block_count, full, count};
    }
    const BlockRow row{full ? &view.full_indices : &view.indices, at.b, at.h, at.row, count};
    for (std::int32_t slot = 0; slot < count; ++slot) {
      const std::int32_t block = row.at(slot);
      if (block < 0 || block >= call_.key_blocks()) return {AttentionRule::key_block, full, block};
      if (blocks.has(row, slot, block)) {
        return {AttentionRule::listed_once, full, block, {at.b, at.h, at.row}};
      }
    }
    return {};
  }

  // Counts are brought into range here. A count out of range is an earlier fault, which is the one reported.
  template <typename Blocks>
  constexpr AttentionFault fault_of_both(const ListRows::Place& at, Blocks& blocks) const {
    const BlockView& view = call_.blocks;
    const BlockRow partial{&view.indices, at.b, at.h, at.row, view.count(at.b, at.h, at.row)};
    const std::int32_t full = view.full_count(at.b, at.h, at.row);
    for (std::int32_t slot = 0; slot < full; ++slot) {
      const std::int32_t block = view.full_indices.at(at.b, at.h, at.row, slot);
      if (blocks.has(partial, partial.count, block)) {
        return {AttentionRule::lists_apart, true, block, {at.b, at.h, at.row}};
      }
    }
    return {};
  }

  constexpr AttentionFault fault_of_ids(const ListRows::Place& at) const {
    const BlockView& view = call_.blocks;
    const std::int32_t count = view.count(at.b, at.h, at.row);
    for (std::int32_t slot = 0; slot < count; ++slot) {
      const std::int32_t tile = view.tile_ids.at(at.b, at.h, at.row, slot);
      if (tile < 0 || tile >= view.tile_count) return {AttentionRule::tile_id, false, tile};
    }
    return {};
  }

  AttentionCall call_;
  std::int64_t cumulative_ = 0;  // for queries, and as many for keys
  std::int64_t entries_ = 0;
  ListRows partial_, full_, both_, tile_ids_;
};

/// Throws InvalidArgument with the message for a fault. Returns if there is none.
void raise(const AttentionFault& fault, const AttentionCall& call);

}  // namespace tilewise
