#include "arguments.h"

#include <array>

#include "check.h"

namespace tilewise::torch_binding {
namespace {

using OptionalTensor = AttentionArguments::OptionalTensor;

Tensor optional_view(const OptionalTensor& tensor, std::string_view name, std::string_view expected) {
  return tensor ? view(*tensor, name, expected) : Tensor();
}

Tensor i32_view(const OptionalTensor& tensor, std::string_view name) {
  return optional_view(tensor, name, "i32");
}

// In torch a mask of rank 0 broadcasts like one with a single element. In the library rank 0 means that there
// is no mask, so it gets rank 1.
Tensor mask_view(const OptionalTensor& mask) {
  Tensor result = optional_view(mask, "mask", "boolean or floating");
  if (mask && result.rank == 0) {
    result.rank = 1;
    result.shape[0] = result.strides[0] = 1;
  }
  return result;
}

// The library reads rows whose last dimension is contiguous. Other tensors are replaced by a copy.
Tensor rows_of_attention(TorchTensor& rows, std::string_view name) {
  const Tensor result = view(rows, name, floating);
  const int last = result.rank - 1;
  if (last < 0 || result.extent(last) <= 1 || result.stride(last) == 1) return result;
  rows = with_contiguous_last(rows);
  return view(rows, name, floating);
}

void check_heads(const Tensor& q, const Tensor& k, bool enable_gqa) {
  if (enable_gqa || q.rank != 4 || k.rank != 4 || q.extent(1) == k.extent(1)) return;
  const std::string expected =
      "True where query has " + std::to_string(q.extent(1)) + " heads and key " + std::to_string(k.extent(1));
  reject("enable_gqa", expected, "False");
}

// A seed on the device of the queries is read by the kernels, so that a CUDA graph can change it. For a CUDA
// call, a seed on the CPU is read by `dropout_of`.
Tensor seed_view(const OptionalTensor& seed, Device queries) {
  if (!seed) return {};
  const bool fits = seed->scalar_type() == torch::headeronly::ScalarType::Long && seed->dim() == 1 &&
                    seed->numel() == 2 && seed->is_contiguous();
  check(fits, "dropout_seed", "int64 [2], contiguous", "another tensor");
  const Device device = device_of(*seed, "dropout_seed");
  if (device != queries && device.type == Device::Type::cpu) return {};
  return Tensor(seed->data_ptr(), DType::i64, std::array{std::int64_t{2}}, device);
}

Dropout dropout_of(double probability, const OptionalTensor& seed) {
  check(seed || !(probability > 0), "dropout_seed", "a seed with dropout", "none");
  Dropout dropout{.probability = static_cast<float>(probability)};
  if (seed && seed->is_cpu()) {
    const auto* words = static_cast<const std::uint64_t*>(seed->const_data_ptr());
    dropout.seed = words[0];
    dropout.offset = words[1];
  }
  return dropout;
}

}  // namespace

AttentionArguments::AttentionArguments(ArgumentStack& stack)
    : query(stack.take<TorchTensor>()),
      key(stack.take<TorchTensor>()),
      value(stack.take<TorchTensor>()),
      attn_mask(stack.take<OptionalTensor>()),
      dropout_p(stack.take<double>()),
      is_causal(stack.take<bool>()),
      scale(stack.take<std::optional<double>>()),
      enable_gqa(stack.take<bool>()),
      dropout_seed(stack.take<OptionalTensor>()),
      bottom_right(stack.take<bool>()),
      window_left(stack.take<std::optional<std::int64_t>>()),
      window_right(stack.take<std::optional<std::int64_t>>()),
      softcap(stack.take<double>()),
      alibi_slopes(stack.take<OptionalTensor>()),
      sinks(stack.take<OptionalTensor>()),
      key_lengths(stack.take<OptionalTensor>()),
      page_table(stack.take<OptionalTensor>()),
      cumulative_q(stack.take<OptionalTensor>()),
      cumulative_k(stack.take<OptionalTensor>()),
      max_length_q(stack.take<std::int64_t>()),
      max_length_k(stack.take<std::int64_t>()),
      block_counts(stack.take<OptionalTensor>()),
      block_indices(stack.take<OptionalTensor>()),
      block_full_counts(stack.take<OptionalTensor>()),
      block_full_indices(stack.take<OptionalTensor>()),
      block_tile_ids(stack.take<OptionalTensor>()),
      block_tiles(stack.take<OptionalTensor>()),
      block_q(stack.take<std::int64_t>()),
      block_k(stack.take<std::int64_t>()),
      kernel_name(stack.take<std::optional<std::string>>()),
      deterministic(stack.take<bool>()),
      allow_tf32(stack.take<bool>()),
      strict(stack.take<bool>()),
      logit_scale(stack.take<OptionalTensor>()),
      batch_invariant(stack.take<bool>()) {}

AttentionArguments AttentionArguments::plain(ArgumentStack& stack, PlainMask mask) {
  auto q = stack.take<TorchTensor>();
  auto k = stack.take<TorchTensor>();
  AttentionArguments arguments(std::move(q), std::move(k), stack.take<TorchTensor>());
  arguments.packed_options = stack.take<TorchTensor>();
  if (mask == PlainMask::given) arguments.attn_mask = stack.take<TorchTensor>();
  if (mask == PlainMask::optional) arguments.attn_mask = stack.take<OptionalTensor>();
  return arguments;
}

void AttentionArguments::unpack_options() {
  const TorchTensor& packed = *packed_options;
  const bool fits = packed.is_cpu() && packed.scalar_type() == torch::headeronly::ScalarType::Double &&
                    packed.numel() == 5 && packed.is_contiguous();
  check(fits, "options", "f64 [5] on the CPU", "another tensor");
  const auto* options = static_cast<const double*>(packed.const_data_ptr());
  is_causal = options[0] != 0;
  enable_gqa = options[1] != 0;
  allow_tf32 = options[2] != 0;
  if (options[3] != 0) scale = options[4];
}

AttentionInputs AttentionArguments::inputs() {
  if (packed_options) unpack_options();
  AttentionInputs inputs{
      .q = rows_of_attention(query, "q"),
      .k = rows_of_attention(key, "k"),
      .v = rows_of_attention(value, "v"),
      .mask = mask_view(attn_mask),
      .alibi_slopes = optional_view(alibi_slopes, "alibi_slopes", "f32"),
      .sinks = optional_view(sinks, "sinks", "f32"),
      .logit_scale = optional_view(logit_scale, "logit_scale", "f32"),
      .key_lengths = i32_view(key_lengths, "key_lengths"),
      .page_table = i32_view(page_table, "page_table"),
      .packed = {.cumulative_q = i32_view(cumulative_q, "packed.cumulative_q"),
                 .cumulative_k = i32_view(cumulative_k, "packed.cumulative_k"),
                 .max_length_q = max_length_q,
                 .max_length_k = max_length_k},
      .blocks = {.block_q = block_q,
                 .block_k = block_k,
                 .counts = i32_view(block_counts, "blocks.counts"),
                 .indices = i32_view(block_indices, "blocks.indices"),
                 .full_counts = i32_view(block_full_counts, "blocks.full_counts"),
                 .full_indices = i32_view(block_full_indices, "blocks.full_indices"),
                 .tile_ids = i32_view(block_tile_ids, "blocks.tile_ids"),
                 .tiles = optional_view(block_tiles, "blocks.tiles", "boolean")},
  };
  inputs.dropout_seed = seed_view(dropout_seed, inputs.q.device);
  check_heads(inputs.q, inputs.k, enable_gqa);
  return inputs;
}

AttentionOptions AttentionArguments::options() const {
  return {
      .scale = scale ? std::optional(static_cast<float>(*scale)) : std::nullopt,
      .causal = is_causal,
      .alignment = bottom_right ? Alignment::bottom_right : Alignment::top_left,
      .window = {.left = window_left, .right = window_right},
      .softcap = static_cast<float>(softcap),
      .dropout = dropout_of(dropout_p, dropout_seed),
      .deterministic = deterministic,
      .batch_invariant = batch_invariant,
      .precision = strict       ? Precision::strict
                   : allow_tf32 ? Precision::allow_tf32
                                : Precision::standard,
      .kernel = kernel_name ? std::string_view(*kernel_name) : "auto",
  };
}

double work_of(const AttentionInputs& inputs) {
  const bool packed = inputs.packed.given();
  const bool paged = inputs.page_table.given();
  const std::int64_t length = packed ? inputs.packed.max_length_k : inputs.k.extent(2);
  const auto keys = static_cast<double>(paged ? length * inputs.page_table.extent(1) : length);
  return 2 * static_cast<double>(inputs.q.size()) * keys;
}

}  // namespace tilewise::torch_binding
