#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <string_view>

#include "runtime.h"
#include "tilewise/tilewise.h"

namespace tilewise::torch_binding {

/// The types of most tensors, for messages.
inline constexpr std::string_view floating = "f32, f16, bf16 or f64";

/// Takes an operator's arguments off torch's stack, in the order of its schema. The operator must take all of
/// them, without an exception in between, since nobody frees arguments that stay on the stack.
class ArgumentStack {
 public:
  explicit ArgumentStack(StableIValue* stack) : next_(stack) {}

  template <typename T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }

 private:
  StableIValue* next_;
};

/// The arguments of attention, in the order of `attention_schema`.
struct AttentionArguments {
  explicit AttentionArguments(ArgumentStack& stack);
  /// Takes the arguments of `plain_attention_schema`, and the mask that may follow them.
  enum class PlainMask : std::uint8_t { none, given, optional };
  static AttentionArguments plain(ArgumentStack& stack, PlainMask mask);

  using OptionalTensor = std::optional<TorchTensor>;
  TorchTensor query, key, value;
  OptionalTensor attn_mask;
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = true;
  OptionalTensor dropout_seed;  // int64 [2]: seed and offset, on the CPU or on the device of query
  bool bottom_right = false;
  std::optional<std::int64_t> window_left, window_right;
  double softcap = 0;
  OptionalTensor alibi_slopes, sinks;
  OptionalTensor key_lengths, page_table;
  OptionalTensor cumulative_q, cumulative_k;
  std::int64_t max_length_q = 0, max_length_k = 0;
  OptionalTensor block_counts, block_indices, block_full_counts, block_full_indices;
  OptionalTensor block_tile_ids, block_tiles;
  std::int64_t block_q = 128, block_k = 128;
  std::optional<std::string> kernel_name;
  bool deterministic = false;
  bool allow_tf32 = false;
  bool strict = false;
  OptionalTensor logit_scale;
  bool batch_invariant = false;
  OptionalTensor packed_options;  // of `plain_attention_schema`

  /// The inputs as views that are valid as long as this object. Tensors whose rows are not contiguous are
  /// copied.
  AttentionInputs inputs();
  AttentionOptions options() const;

 private:
  AttentionArguments(TorchTensor q, TorchTensor k, TorchTensor v)
      : query(std::move(q)), key(std::move(k)), value(std::move(v)) {}
  void unpack_options();
};

/// The approximate number of multiply-adds of a forward pass in which nothing is hidden.
double work_of(const AttentionInputs& inputs);

inline constexpr const char* attention_schema =
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, float? scale=None, bool enable_gqa=True, Tensor? dropout_seed=None, "
    "bool bottom_right=False, SymInt? window_left=None, SymInt? window_right=None, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? key_lengths=None, Tensor? page_table=None, "
    "Tensor? cumulative_q=None, Tensor? cumulative_k=None, SymInt max_length_q=0, SymInt max_length_k=0, "
    "Tensor? block_counts=None, Tensor? block_indices=None, Tensor? block_full_counts=None, "
    "Tensor? block_full_indices=None, Tensor? block_tile_ids=None, Tensor? block_tiles=None, "
    "SymInt block_q=128, SymInt block_k=128, str? kernel_name=None, bool deterministic=False, "
    "bool allow_tf32=False, bool strict=False, Tensor? logit_scale=None, bool batch_invariant=False";
// The schema of plain calls is short because arguments are expensive: torch looks up by name each argument
// that was not given, and asks of each argument that is not a tensor whether it might be one, which takes
// some 800 instructions. So a call with a mask has its own overload, and the options are a tensor: f64 [5] on
// the CPU with is_causal, enable_gqa, allow_tf32, whether there is a scale, and the scale.
inline constexpr const char* plain_attention_schema =
    "Tensor query, Tensor key, Tensor value, Tensor options";

}  // namespace tilewise::torch_binding
