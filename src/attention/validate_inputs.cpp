#include <array>
#include <cmath>
#include <string>

#include "attention/kernel.h"
#include "attention/validate.h"
#include "attention/views.h"
#include "core/checks.h"
#include "core/sizes.h"

namespace tilewise {
namespace {

constexpr std::int64_t max_head_dim = 4096;
constexpr std::int64_t max_length = std::int64_t{1} << 31;  // positions are 32-bit in the dropout counter

void check_options(const AttentionOptions& options) {
  check_kernel_name(attention_kernel_list(), options.kernel);
  check(!options.scale || std::isfinite(*options.scale), "scale", "a finite number",
        options.scale.value_or(0));
  check(std::isfinite(options.softcap) && options.softcap >= 0, "softcap", "a finite number, 0 or above",
        options.softcap);
  check(options.dropout.probability >= 0 && options.dropout.probability <= 1, "dropout.probability",
        "a number in [0, 1]", options.dropout.probability);
  check(options.window.left.value_or(0) >= 0, "window.left", "0 or above, or absent",
        options.window.left.value_or(0));
  check(options.window.right.value_or(0) >= 0, "window.right", "0 or above, or absent",
        options.window.right.value_or(0));
  check_enumerator(options.alignment, Alignment::bottom_right, "alignment", "top_left or bottom_right");
  check_precision(options.precision);
}

void check_dropout_seed(const Tensor& seed, const Context& context) {
  check_dtype(seed, "dropout_seed", DType::i64);
  check_shape(seed, "dropout_seed", {2}, "[seed, offset]", context);
  check_contiguous_last(seed, "dropout_seed");
}

// Whether rows of the mask begin at multiples of 16 bytes and their keys are contiguous.
bool has_boxes(const Tensor& mask, std::int64_t keys) {
  const int last = mask.rank - 1;
  return last >= 0 && mask.extent(last) == keys && (keys == 1 || mask.stride(last) == 1) &&
         has_aligned_rows(mask);
}

// Whether the keys of each row are contiguous or broadcast.
bool has_plain_rows(const Tensor& mask, std::int64_t keys) {
  const int last = mask.rank - 1;
  return last < 0 || keys == 1 || mask.extent(last) == 1 || mask.stride(last) == 1 || mask.stride(last) == 0;
}

Layout layout_of(const AttentionInputs& inputs) {
  if (inputs.packed.given()) return Layout::packed;
  return inputs.page_table.given() ? Layout::paged : Layout::dense;
}

// Checks rank and type of q, k and v and that their shapes agree. Fills in the problem's shape.
void check_qkv(const AttentionInputs& inputs, const Context& context, AttentionProblem& problem) {
  const Tensor& q = inputs.q;
  const Tensor& k = inputs.k;
  const Tensor& v = inputs.v;
  const bool packed = problem.layout == Layout::packed;
  const bool paged = problem.layout == Layout::paged;
  const int rank = packed ? 3 : 4;
  check(q.rank == rank, "q", packed ? "rank 3 [total_q, Hq, D]" : "rank 4 [B, Hq, Sq, D]", q);
  check(k.rank == rank, "k",
        packed  ? "rank 3 [total_k, Hkv, D]"
        : paged ? "rank 4 [pages, Hkv, page, D]"
                : "rank 4 [B, Hkv, Sk, D]",
        k);
  check(v.rank == rank, "v",
        packed  ? "rank 3 [total_k, Hkv, Dv]"
        : paged ? "rank 4 [pages, Hkv, page, Dv]"
                : "rank 4 [B, Hkv, Sk, Dv]",
        v);
  for (const auto& [tensor, name] : {std::pair(&q, "q"), std::pair(&k, "k"), std::pair(&v, "v")}) {
    check_memory(*tensor, name, context);
    check(is_floating(tensor->dtype), name, "f32, f16, bf16 or f64", to_string(tensor->dtype));
    check(
        tensor->dtype == q.dtype, name, [&] { return "the type of q, " + std::string(to_string(q.dtype)); },
        to_string(tensor->dtype));
    check_contiguous_last(*tensor, name);
  }

  const int heads = 1;
  problem.device = context.device;
  problem.dtype = q.dtype;
  problem.heads_q = q.extent(heads);
  problem.heads_kv = k.extent(heads);
  problem.dim_qk = q.extent(rank - 1);
  problem.dim_v = v.extent(rank - 1);
  check(problem.dim_qk >= 1 && problem.dim_qk <= max_head_dim, "q", "a head dim from 1 to 4096", q);
  check(problem.dim_v >= 1 && problem.dim_v <= max_head_dim, "v", "a head dim from 1 to 4096", v);
  check(
      k.extent(rank - 1) == problem.dim_qk, "k",
      [&] { return "the head dim of q, " + std::to_string(problem.dim_qk); }, k);
  check(
      v.extent(heads) == problem.heads_kv, "v",
      [&] { return "as many heads as k, " + std::to_string(problem.heads_kv); }, v);
  const bool divides = problem.heads_kv > 0 ? problem.heads_q % problem.heads_kv == 0 : problem.heads_q == 0;
  check(divides, "q", [&] { return "a multiple of k's " + std::to_string(problem.heads_kv) + " heads"; }, q);

  const int length = packed ? 0 : 2;
  check(
      v.extent(length) == k.extent(length), "v",
      [&] { return "the length of k, " + std::to_string(k.extent(length)); }, v);
  if (!packed) {
    check(
        v.extent(0) == k.extent(0), "v", [&] { return "k's first extent, " + std::to_string(k.extent(0)); },
        v);
  }
  if (problem.layout == Layout::dense) {
    problem.batch = q.extent(0);
    check(
        k.extent(0) == problem.batch, "k", [&] { return "the batch of q, " + std::to_string(problem.batch); },
        k);
    problem.length_q = q.extent(2);
    problem.length_k = k.extent(2);
  }
}

void check_packed(const AttentionInputs& inputs, const Context& context, AttentionProblem& problem) {
  const PackedSequences& packed = inputs.packed;
  const auto check_cumulative = [&](const Tensor& tensor, std::string_view name) {
    check(tensor.rank == 1 && tensor.extent(0) >= 1, name, "rank 1 [sequences + 1]", tensor);
    check_dtype(tensor, name, DType::i32);
    check_memory(tensor, name, context);
  };
  check_cumulative(packed.cumulative_q, "packed.cumulative_q");
  check_cumulative(packed.cumulative_k, "packed.cumulative_k");
  problem.batch = packed.cumulative_q.extent(0) - 1;
  check(
      packed.cumulative_k.extent(0) == problem.batch + 1, "packed.cumulative_k",
      [&] { return "as many entries as cumulative_q, " + std::to_string(problem.batch + 1); },
      packed.cumulative_k);
  check(packed.max_length_q >= 0 && packed.max_length_q < max_length, "packed.max_length_q",
        "0 or above and below 2^31", packed.max_length_q);
  check(packed.max_length_k >= 0 && packed.max_length_k < max_length, "packed.max_length_k",
        "0 or above and below 2^31", packed.max_length_k);
  // No sequence is longer than all together. A larger bound would only cost time and workspace.
  problem.length_q = std::min(packed.max_length_q, inputs.q.extent(0));
  problem.length_k = std::min(packed.max_length_k, inputs.k.extent(0));
  check(!inputs.mask.given(), "mask", "none with packed sequences", inputs.mask);
  check(!inputs.blocks.given(), "blocks", "none with packed sequences", "a block mask");
  check(!inputs.page_table.given(), "page_table", "none with packed sequences", inputs.page_table);
  check(!inputs.key_lengths.given(), "key_lengths", "none with packed sequences", inputs.key_lengths);
}

void check_paged(const AttentionInputs& inputs, const Context& context, AttentionProblem& problem) {
  const Tensor& table = inputs.page_table;
  problem.batch = inputs.q.extent(0);
  problem.length_q = inputs.q.extent(2);
  check(
      table.rank == 2 && table.extent(0) == problem.batch, "page_table",
      [&] { return "[B, max_pages] with B " + std::to_string(problem.batch); }, table);
  check_dtype(table, "page_table", DType::i32);
  check_memory(table, "page_table", context);
  check(inputs.k.extent(2) >= 1, "k", "pages of at least one key", inputs.k);
  check(inputs.key_lengths.given(), "key_lengths", "i32 [B] with paged keys", "none");
  problem.length_k = bounded_product(table.extent(1), inputs.k.extent(2));
}

void check_piece(const Piece& piece, const AttentionInputs& inputs, const AttentionProblem& problem) {
  const auto check_none = [](bool given, std::string_view name) {
    check(!given, name, "none with a piece", "some");
  };
  check(problem.layout == Layout::dense, "piece", "dense tensors", "packed or paged ones");
  check_none(inputs.key_lengths.given(), "key_lengths");
  check_none(inputs.blocks.given(), "blocks");
  check(piece.step >= 1 && piece.step < max_length, "piece.step", "1 or above and below 2^31", piece.step);
  const auto check_within = [](std::int64_t offset, std::int64_t step, std::int64_t count, std::int64_t whole,
                               std::string_view name, std::string_view whole_name) {
    check(whole >= 0 && whole < max_length, whole_name, "0 or above and below 2^31", whole);
    check(
        offset >= 0 && offset <= whole && (count == 0 || offset + (count - 1) * step < whole), name,
        [&] { return "positions from 0 up to " + std::to_string(whole) + " of the whole"; },
        [&] {
          return std::to_string(count) + " positions from " + std::to_string(offset) + " in steps of " +
                 std::to_string(step);
        });
  };
  check_within(piece.q_offset, piece.step, problem.length_q, piece.length_q, "piece.q_offset",
               "piece.length_q");
  check_within(piece.k_offset, piece.step, problem.length_k, piece.length_k, "piece.k_offset",
               "piece.length_k");
  check_within(piece.head_offset, 1, problem.heads_q, piece.heads_q, "piece.head_offset", "piece.heads_q");
  check(piece.batch_offset >= 0 &&
            (piece.batch_offset + problem.batch) * std::max<std::int64_t>(piece.heads_q, 1) < 2 * max_length,
        "piece.batch_offset", "0 or above, and fewer than 2^32 heads in total", piece.batch_offset);
}

void check_mask(const Tensor& mask, const Context& context, const AttentionProblem& problem) {
  check(mask.dtype == DType::boolean || is_floating(mask.dtype), "mask", "boolean or floating",
        to_string(mask.dtype));
  check(
      mask.dtype == DType::boolean || mask.dtype == DType::f32 || mask.dtype == problem.dtype, "mask",
      [&] { return "boolean, f32 or the type of q, " + std::string(to_string(problem.dtype)); },
      to_string(mask.dtype));
  check(mask.rank <= 4, "mask", "at most rank 4", mask);
  const std::array full = {problem.batch, problem.heads_q, problem.length_q, problem.length_k};
  for (int dim = 0; dim < mask.rank; ++dim) {
    const std::int64_t whole = full[static_cast<std::size_t>(dim + 4 - mask.rank)];
    check(
        mask.extent(dim) == 1 || mask.extent(dim) == whole, "mask",
        [&] {
          return "a shape that broadcasts to [B, Hq, Sq, Sk] = " +
                 text_of({problem.batch, problem.heads_q, problem.length_q, problem.length_k});
        },
        mask);
  }
  check_memory(mask, "mask", context);
}

// A block size above the number of queries or keys is reduced to that number, since kernels spend time and
// memory on whole blocks.
std::int64_t within_length(std::int64_t block, std::int64_t length) {
  return std::min(block, std::max<std::int64_t>(length, 1));
}

void check_blocks(const BlockMask& blocks, const Context& context, const AttentionProblem& problem) {
  check(blocks.block_q >= 1, "blocks.block_q", "1 or above", blocks.block_q);
  check(blocks.block_k >= 1, "blocks.block_k", "1 or above", blocks.block_k);
  const std::int64_t block_q = within_length(blocks.block_q, problem.length_q);
  const std::int64_t rows = (problem.length_q + block_q - 1) / block_q;
  const auto check_list = [&](const Tensor& tensor, std::string_view name, int rank) {
    check(tensor.rank == rank, name,
          rank == 3 ? "rank 3 [B|1, Hq|1, query blocks]" : "rank 4 [B|1, Hq|1, query blocks, slots]", tensor);
    check_dtype(tensor, name, DType::i32);
    const bool fits = (tensor.extent(0) == 1 || tensor.extent(0) == problem.batch) &&
                      (tensor.extent(1) == 1 || tensor.extent(1) == problem.heads_q) &&
                      tensor.extent(2) == rows;
    check(
        fits, name,
        [&] {
          return "[B|1, Hq|1, query blocks] with B " + std::to_string(problem.batch) + ", Hq " +
                 std::to_string(problem.heads_q) + " and " + std::to_string(rows) + " query blocks";
        },
        tensor);
    check_memory(tensor, name, context);
  };
  check_list(blocks.counts, "blocks.counts", 3);
  check_list(blocks.indices, "blocks.indices", 4);
  check(blocks.full_counts.given() == blocks.full_indices.given(), "blocks.full_indices",
        "both full_counts and full_indices, or neither", "one of them");
  if (blocks.full_counts.given()) {
    check_list(blocks.full_counts, "blocks.full_counts", 3);
    check_list(blocks.full_indices, "blocks.full_indices", 4);
  }
  check(blocks.tile_ids.given() == blocks.tiles.given(), "blocks.tile_ids",
        "both tile_ids and tiles, or neither", "one of them");
  if (blocks.tile_ids.given()) {
    check_list(blocks.tile_ids, "blocks.tile_ids", 4);
    check(
        blocks.tile_ids.extent(3) == blocks.indices.extent(3), "blocks.tile_ids",
        [&] { return "as many slots as indices, " + std::to_string(blocks.indices.extent(3)); },
        blocks.tile_ids);
    check_dtype(blocks.tiles, "blocks.tiles", DType::boolean);
    check(blocks.tiles.rank == 3 && blocks.tiles.extent(1) == blocks.block_q &&
              blocks.tiles.extent(2) == blocks.block_k,
          "blocks.tiles", "rank 3 [tiles, block_q, block_k]", blocks.tiles);
    check_memory(blocks.tiles, "blocks.tiles", context);
  }
}

// Checks that the block lists broadcast over B and Hq like their counts.
void check_broadcast(const BlockMask& blocks) {
  const auto check_beside = [](const Tensor& counts, std::string_view counts_name, const Tensor& beside,
                               std::string_view name) {
    check(
        beside.extent(0) == counts.extent(0) && beside.extent(1) == counts.extent(1), name,
        [&] { return "the leading extents of " + std::string(counts_name) + ", " + shape_string(counts); },
        beside);
  };
  check_beside(blocks.counts, "its counts", blocks.indices, "blocks.indices");
  if (blocks.full_counts.given()) {
    check_beside(blocks.full_counts, "its counts", blocks.full_indices, "blocks.full_indices");
  }
  if (blocks.tile_ids.given()) check_beside(blocks.counts, "counts", blocks.tile_ids, "blocks.tile_ids");
}

BlockView block_view(const BlockMask& blocks, const AttentionProblem& problem) {
  BlockView view{.block_q = within_length(blocks.block_q, problem.length_q),
                 .block_k = within_length(blocks.block_k, problem.length_k),
                 .counts = indices_of(blocks.counts),
                 .indices = indices_of(blocks.indices),
                 .full_counts = indices_of(blocks.full_counts),
                 .full_indices = indices_of(blocks.full_indices),
                 .tile_ids = indices_of(blocks.tile_ids),
                 .slots = blocks.indices.extent(3),
                 .full_slots = blocks.full_indices.extent(3),
                 .tiles = static_cast<const std::byte*>(blocks.tiles.data),
                 .tile_count = blocks.tiles.extent(0)};
  for (int dim = 0; dim < blocks.tiles.rank; ++dim) view.tile_stride[dim] = blocks.tiles.stride(dim);
  return view;
}

Band band_of(const AttentionOptions& options) {
  Band band;
  if (options.window.left) band.left = std::min(*options.window.left, Band::unbounded);
  if (options.window.right) band.right = std::min(*options.window.right, Band::unbounded);
  if (options.causal) band.right = 0;
  return band;
}

// ⌊a / b⌋ for b > 0.
std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// The band of the whole in the indices of the piece. In the whole, query i stands `ahead` positions after key
// i of the piece, so it sees key i + n of the piece if n·step − ahead is from −left to right.
Band band_of_piece(const Band& whole, std::int64_t ahead, std::int64_t step) {
  Band band;
  if (whole.left < Band::unbounded) band.left = floor_div(whole.left - ahead, step);
  if (whole.right < Band::unbounded) band.right = floor_div(whole.right + ahead, step);
  return band;
}

void set_piece(const Piece& piece, AttentionCall& call) {
  AttentionProblem& problem = call.problem;
  const std::int64_t more_keys = piece.length_k - piece.length_q;
  call.place = {.of_piece = true,
                .q_offset = piece.q_offset,
                .k_offset = piece.k_offset,
                .step = piece.step,
                .more_keys = more_keys,
                .batch_offset = piece.batch_offset,
                .head_offset = piece.head_offset,
                .heads = piece.heads_q};
  const std::int64_t shift = call.alignment == Alignment::bottom_right ? more_keys : 0;
  Band& band = call.band;
  band = band_of_piece(band, piece.q_offset + shift - piece.k_offset, piece.step);
  if (band.left >= problem.length_q - 1) band.left = Band::unbounded;  // such a side hides nothing
  if (band.right >= problem.length_k - 1) band.right = Band::unbounded;
  band.left = std::max(band.left, -problem.length_k);  // even smaller numbers hide no more
  band.right = std::max(band.right, -problem.length_q);
  call.alignment = Alignment::top_left;
  AttentionFeatures& features = problem.features;
  features.causal = features.causal && band.right == 0;
  features.window = band.left < Band::unbounded || (band.right < Band::unbounded && !features.causal);
  const bool own_distances =
      piece.step == 1 && call.distance({}, 0, 0) == problem.length_k - problem.length_q;
  const bool own_counters = piece.step == 1 && piece.q_offset == 0 && piece.k_offset == 0 &&
                            call.place.head_index(0, 0) == 0 && piece.heads_q == problem.heads_q;
  problem.piece.placed = (features.alibi && !own_distances) || (features.dropout && !own_counters);
  problem.piece.off_diagonal = band.left < 0 || band.right < 0;
}

/// The largest number of keys that a query sees by the band and the longest sequence. With a query's position
/// the number first increases, then stays, then decreases. So it is largest at position `left`, or at the
/// query nearest to that.
std::int64_t most_keys(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  const Band& band = call.band;
  if (!band.bounded() || problem.length_q == 0) return problem.length_k;
  const bool bottom_right = call.alignment == Alignment::bottom_right;
  std::int64_t position = band.left;
  if (!bottom_right || (!call.packed() && call.key_lengths.data == nullptr)) {
    const std::int64_t first = bottom_right ? problem.length_k - problem.length_q : 0;
    position = std::clamp(position, first, first + problem.length_q - 1);
  }
  const std::int64_t begin = std::max<std::int64_t>(0, position - band.left);
  const std::int64_t end = std::min(problem.length_k, position + band.right + 1);
  return std::max<std::int64_t>(0, end - begin);
}

/// An extent of 1 leaves its stride unused, so one sequence could be aligned where several are not. Whether a
/// query sees one key at most must not depend on the number of keys either.
void set_facts_of_any_batch(const AttentionInputs& inputs, const Band& band, AttentionProblem& problem) {
  problem.aligned = problem.aligned && has_aligned_strides(inputs.q) && has_aligned_strides(inputs.k) &&
                    has_aligned_strides(inputs.v);
  problem.aligned_mask = problem.aligned_mask && (!inputs.mask.given() || has_aligned_strides(inputs.mask));
  problem.most_keys = std::min(usual_length, band.left + band.right + 1);
}

}  // namespace

void set_views(const AttentionInputs& inputs, AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  call.q = rows_of(inputs.q, problem.layout);
  call.k = rows_of(inputs.k, problem.layout);
  call.v = rows_of(inputs.v, problem.layout);
  call.mask = mask_view(inputs.mask);
  call.alibi_slopes = head_values(inputs.alibi_slopes);
  call.sinks = head_values(inputs.sinks);
  call.logit_scale = head_values(inputs.logit_scale);
  call.key_lengths = indices_of(inputs.key_lengths);
  call.cumulative_q = indices_of(inputs.packed.cumulative_q);
  call.cumulative_k = indices_of(inputs.packed.cumulative_k);
  call.page_table = indices_of(inputs.page_table);
  call.blocks = block_view(inputs.blocks, problem);
  call.dropout.words = static_cast<const std::int64_t*>(inputs.dropout_seed.data);
}

AttentionCall checked_inputs(Pass pass, const AttentionInputs& inputs, const AttentionOptions& options,
                             const Context& context, Contents contents) {
  check_options(options);
  check_context(context);

  AttentionCall call;
  AttentionProblem& problem = call.problem;
  problem.pass = pass;
  problem.layout = layout_of(inputs);
  check_qkv(inputs, context, problem);
  if (problem.heads_kv > 0) call.heads_together = problem.heads_q / problem.heads_kv;
  if (problem.layout == Layout::packed) check_packed(inputs, context, problem);
  if (problem.layout == Layout::paged) check_paged(inputs, context, problem);
  check(problem.length_q < max_length, "q", "fewer than 2^31 queries", inputs.q);
  check(problem.length_k < max_length, "k", "fewer than 2^31 keys", inputs.k);
  // Entries without heads count, too, since the checks of index tensors go over them.
  check(bounded_product(problem.batch, std::max<std::int64_t>(problem.heads_q, 1)) < 2 * max_length, "q",
        "fewer than 2^32 heads in total", inputs.q);

  if (options.piece) check_piece(*options.piece, inputs, problem);
  check(!options.piece || !options.batch_invariant, "batch_invariant", "false with a piece", "true");
  if (inputs.mask.given()) check_mask(inputs.mask, context, problem);
  if (inputs.blocks.given()) check_blocks(inputs.blocks, context, problem);
  if (inputs.alibi_slopes.given()) {
    const Tensor& slopes = inputs.alibi_slopes;
    check_statistics_dtype(slopes, "alibi_slopes", problem.dtype);
    check(
        has_shape(slopes, {problem.heads_q}) || has_shape(slopes, {problem.batch, problem.heads_q}),
        "alibi_slopes", [&] { return "[Hq] or [B, Hq] = " + text_of({problem.batch, problem.heads_q}); },
        slopes);
    check_memory(slopes, "alibi_slopes", context);
  }
  if (inputs.sinks.given()) {
    check_statistics_dtype(inputs.sinks, "sinks", problem.dtype);
    check_shape(inputs.sinks, "sinks", {problem.heads_q}, "[Hq]", context);
  }
  if (inputs.logit_scale.given()) {
    check_statistics_dtype(inputs.logit_scale, "logit_scale", problem.dtype);
    check_shape(inputs.logit_scale, "logit_scale", {problem.heads_q}, "[Hq]", context);
  }
  if (inputs.key_lengths.given()) {
    check_dtype(inputs.key_lengths, "key_lengths", DType::i32);
    check_shape(inputs.key_lengths, "key_lengths", {problem.batch}, "[B]", context);
  }
  if (inputs.dropout_seed.given()) check_dropout_seed(inputs.dropout_seed, context);

  const double dim = static_cast<double>(problem.dim_qk);
  call.dropout = DropoutMask(options.dropout);
  set_views(inputs, call);
  call.total_q = problem.layout == Layout::packed ? inputs.q.extent(0) : 0;
  call.total_k = problem.layout == Layout::packed ? inputs.k.extent(0) : 0;
  call.page = problem.layout == Layout::paged ? inputs.k.extent(2) : 0;
  call.pages = problem.layout == Layout::paged ? inputs.k.extent(0) : 0;
  call.most_length = problem.layout == Layout::paged && call.pages == 0 ? 0 : problem.length_k;
  call.scale = options.scale ? static_cast<double>(*options.scale) : 1.0 / std::sqrt(dim);
  call.softcap = static_cast<double>(options.softcap);
  call.band = band_of(options);
  call.alignment = options.alignment;
  call.deterministic = options.deterministic || options.batch_invariant;
  problem.batch_invariant = options.batch_invariant;
  call.allow_tf32 = options.precision == Precision::allow_tf32;
  problem.strict =
      options.precision == Precision::strict && (problem.dtype == DType::f16 || problem.dtype == DType::bf16);
  problem.features = {
      .mask = !inputs.mask.given()                  ? MaskKind::none
              : inputs.mask.dtype == DType::boolean ? MaskKind::boolean
                                                    : MaskKind::additive,
      .causal = options.causal,
      .window = options.window.left.has_value() || options.window.right.has_value(),
      .softcap = options.softcap > 0,
      .alibi = inputs.alibi_slopes.given(),
      .sinks = inputs.sinks.given(),
      .dropout = options.dropout.probability > 0,
      .key_lengths = inputs.key_lengths.given(),
      .block_mask = inputs.blocks.given(),
      .logit_scale = inputs.logit_scale.given(),
  };
  call.place.heads = problem.heads_q;
  if (options.piece) set_piece(*options.piece, call);
  problem.most_keys = most_keys(call);
  problem.aligned = has_aligned_rows(inputs.q) && has_aligned_rows(inputs.k) && has_aligned_rows(inputs.v);
  problem.aligned_mask = !inputs.mask.given() || has_boxes(inputs.mask, problem.length_k);
  if (options.batch_invariant) set_facts_of_any_batch(inputs, call.band, problem);
  problem.mask_in_rows = !inputs.mask.given() || has_plain_rows(inputs.mask, problem.length_k);
  problem.f32_mask = inputs.mask.given() && inputs.mask.dtype == DType::f32;
  problem.key_mask = problem.features.mask == MaskKind::boolean && call.mask.stride[1] == 0 &&
                     call.mask.stride[2] == 0 && !options.batch_invariant;
  problem.block_q = call.blocks.block_q;
  problem.block_k = call.blocks.block_k;
  problem.aligned_tiles =
      !inputs.blocks.tiles.given() || has_boxes(inputs.blocks.tiles, inputs.blocks.block_k);
  problem.key_blocks = inputs.blocks.given() && problem.block_q >= problem.length_q &&
                       problem.block_k >= problem.length_k && call.blocks.tile_stride[1] == 0 &&
                       (call.blocks.tile_stride[2] == 1 || problem.block_k == 1);
  problem.repeated_values = problem.length_k > 1 && call.v.stride_s == 0;
  problem.usual_scale = call.scale >= 1e-20;
  problem.queries = call.rows_q();
  problem.keys = call.rows_k();
  if (context.device.type == Device::Type::cpu) {
    if (inputs.blocks.given()) check_broadcast(inputs.blocks);
    if (contents == Contents::checked) check_indices(call, context);
  }
  return call;
}

}  // namespace tilewise
