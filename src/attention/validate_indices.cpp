#include <string>
#include <vector>

#include "attention/index_rules.h"
#include "attention/kernel.h"
#include "attention/validate.h"
#include "core/check.h"
#include "core/debug.h"
#ifdef TILEWISE_HAS_CUDA
#include "cuda/runtime/check_indices.h"
#endif

namespace tilewise {
namespace {

// Finds blocks in a row's list by marks on all key blocks, so that each entry of a list is read once.
class MarkedBlocks {
 public:
  explicit MarkedBlocks(std::int64_t key_blocks) : marks_(static_cast<std::size_t>(key_blocks)) {}

  /// Whether the block is among the first `count` of the row's list. Callers ask for one row with increasing
  /// `count`, so that each entry is marked once. All entries must be valid key blocks.
  bool has(const BlockRow& row, std::int32_t count, std::int32_t block) {
    if (!(row == row_) || count < marked_) {
      row_ = row;
      marked_ = 0;
      ++row_number_;
    }
    for (; marked_ < count; ++marked_) marks_[static_cast<std::size_t>(row.at(marked_))] = row_number_;
    return marks_[static_cast<std::size_t>(block)] == row_number_;
  }

 private:
  std::vector<std::uint32_t> marks_;  // for each key block, the number of the last row that listed it
  std::uint32_t row_number_ = 0;
  BlockRow row_;
  std::int32_t marked_ = 0;
};

std::string value_at(const AttentionFault& fault) {
  return std::to_string(fault.value) + " at index " + std::to_string(fault.place[0]);
}

std::string row_of(const AttentionFault& fault) {
  return "row " + std::to_string(fault.place[2]) + " of batch entry " + std::to_string(fault.place[0]) +
         ", head " + std::to_string(fault.place[1]);
}

}  // namespace

void raise(const AttentionFault& fault, const AttentionCall& call) {
  const auto up_to = [](const char* what, std::int64_t last) { return what + std::to_string(last); };
  const bool second = fault.second;
  const std::string_view cumulative = second ? "packed.cumulative_k" : "packed.cumulative_q";
  const std::string_view blocks = second ? "blocks.full_indices" : "blocks.indices";
  constexpr std::string_view once = "each key block at most once in a row of query blocks";
  switch (fault.rule) {
    case AttentionRule::none: return;
    case AttentionRule::starts_at_0: reject(cumulative, "a first entry of 0", fault.value);
    case AttentionRule::never_falls: reject(cumulative, "entries that do not decrease", value_at(fault));
    case AttentionRule::longest:
      reject(cumulative,
             up_to("sequences of at most the maximum length ",
                   second ? call.problem.length_k : call.problem.length_q),
             value_at(fault));
    case AttentionRule::ends_inside:
      reject(cumulative, up_to("a last entry of at most ", second ? call.total_k : call.total_q),
             fault.value);
    case AttentionRule::key_length:
      reject("key_lengths", up_to("lengths from 0 to ", call.problem.length_k), value_at(fault));
    case AttentionRule::page: reject("page_table", up_to("page ids from 0 to ", call.pages - 1), fault.value);
    case AttentionRule::block_count:
      reject(blocks,
             up_to("counts from 0 to ", second ? call.blocks.full_slots : call.blocks.slots) + ", its slots",
             fault.value);
    case AttentionRule::key_block:
      reject(blocks, up_to("key blocks from 0 to ", call.key_blocks() - 1), fault.value);
    case AttentionRule::listed_once:
      reject(blocks, once, "block " + std::to_string(fault.value) + " twice in " + row_of(fault));
    case AttentionRule::lists_apart:
      reject(
          blocks, once,
          "block " + std::to_string(fault.value) + ", which blocks.indices lists too, in " + row_of(fault));
    case AttentionRule::tile_id:
      reject("blocks.tile_ids", up_to("ids from 0 to ", call.blocks.tile_count - 1), fault.value);
  }
}

void check_indices(const AttentionCall& call, const Context& context) {
  const AttentionFeatures& features = call.problem.features;
  if (!call.packed() && !features.key_lengths && !features.block_mask) return;
  if (context.device.type == Device::Type::cpu) {
    const AttentionIndices indices(call);
    MarkedBlocks blocks(features.block_mask ? call.key_blocks() : 0);
    const std::int64_t items = indices.items();
    for (std::int64_t item = 0; item < items; ++item) raise(indices.fault(item, blocks), call);
    return;
  }
#ifdef TILEWISE_HAS_CUDA
  if (checks_indices(context)) raise(cuda::first_fault(AttentionIndices(call), context), call);
#endif
}

}  // namespace tilewise
