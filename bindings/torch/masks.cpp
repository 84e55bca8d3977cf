#include <algorithm>
#include <array>
#include <vector>

#include "arguments.h"
#include "attention.h"
#include "check.h"
#include "kinds.h"

// Masks by ranges: slices are tensors int64 [slices, 7] with the fields of tilewise::MaskSlice.

namespace tilewise::torch_binding {
namespace {

using torch::stable::detail::from;
using Sizes = std::vector<std::int64_t>;

constexpr std::size_t slice_fields = 7;
static_assert(sizeof(MaskSlice) == slice_fields * sizeof(std::int64_t));

template <typename T>
TorchTensor tensor_of(const std::vector<T>& values, std::initializer_list<std::int64_t> shape, DType dtype) {
  const std::vector<std::int64_t> extents(shape);
  TorchTensor tensor = empty(extents, dtype, {});
  std::copy(values.begin(), values.end(), static_cast<T*>(tensor.data_ptr()));
  return tensor;
}

TorchTensor tensor_of(const std::vector<MaskSlice>& slices) {
  std::vector<std::int64_t> fields;
  fields.reserve(slices.size() * slice_fields);
  for (const MaskSlice& slice : slices) {
    fields.insert(fields.end(), {slice.q_begin, slice.q_end, slice.k_begin, slice.k_end, slice.lowest,
                                 slice.highest, slice.mask});
  }
  return tensor_of(fields, {static_cast<std::int64_t>(slices.size()), slice_fields}, DType::i64);
}

std::vector<MaskSlice> slices_of(const TorchTensor& tensor) {
  const bool fits = tensor.is_cpu() && tensor.scalar_type() == torch::headeronly::ScalarType::Long &&
                    tensor.dim() == 2 && tensor.size(1) == static_cast<std::int64_t>(slice_fields) &&
                    tensor.is_contiguous();
  check(fits, "slices", "int64 [slices, 7] on the CPU, contiguous", "another tensor");
  const auto* fields = static_cast<const std::int64_t*>(tensor.const_data_ptr());
  std::vector<MaskSlice> slices(static_cast<std::size_t>(tensor.size(0)));
  for (MaskSlice& slice : slices) {
    slice = {.q_begin = fields[0],
             .q_end = fields[1],
             .k_begin = fields[2],
             .k_end = fields[3],
             .lowest = fields[4],
             .highest = fields[5],
             .mask = fields[6]};
    fields += slice_fields;
  }
  return slices;
}

std::vector<TorchTensor> tensors_of(const BlockLists& lists) {
  const std::array tiles_shape = {lists.tile_count(), lists.block_q, lists.block_k};
  TorchTensor tiles = empty(tiles_shape, DType::boolean, {});
  lists.write_tiles(static_cast<std::uint8_t*>(tiles.data_ptr()));
  return {tensor_of(lists.counts, {lists.masks, 1, lists.rows}, DType::i32),
          tensor_of(lists.indices, {lists.masks, 1, lists.rows, lists.slots}, DType::i32),
          tensor_of(lists.full_counts, {lists.masks, 1, lists.rows}, DType::i32),
          tensor_of(lists.full_indices, {lists.masks, 1, lists.rows, lists.full_slots}, DType::i32),
          tensor_of(lists.tile_ids, {lists.masks, 1, lists.rows, lists.slots}, DType::i32),
          tiles};
}

}  // namespace

void block_lists_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const auto slices = taken.take<TorchTensor>();
    BlockGrid grid;
    for (std::int64_t* field : {&grid.masks, &grid.length_q, &grid.length_k, &grid.block_q, &grid.block_k}) {
      *field = taken.take<std::int64_t>();
    }
    stack[0] = from(tensors_of(make_block_lists(slices_of(slices), grid)));
  });
}

void document_slices_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const auto lengths = taken.take<Sizes>();
    stack[0] = from(tensor_of(masks::documents(lengths, taken.take<bool>())));
  });
}

void prefix_slices_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const auto length = taken.take<std::int64_t>();
    stack[0] = from(tensor_of(masks::prefix(length, taken.take<std::int64_t>())));
  });
}

void shared_prompt_slices_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const auto prompt = taken.take<std::int64_t>();
    stack[0] = from(tensor_of(masks::shared_prompt(prompt, taken.take<Sizes>())));
  });
}

void block_causal_slices_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const auto length = taken.take<std::int64_t>();
    stack[0] = from(tensor_of(masks::block_causal(length, taken.take<std::int64_t>())));
  });
}

void neighbourhood_slices_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const auto extents = taken.take<Sizes>();
    stack[0] = from(tensor_of(masks::neighbourhood(extents, taken.take<Sizes>())));
  });
}

}  // namespace tilewise::torch_binding
