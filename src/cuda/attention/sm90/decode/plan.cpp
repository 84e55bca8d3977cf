#include "cuda/attention/sm90/decode/plan.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "cuda/attention/sm90/forward/choice.h"

namespace tilewise::cuda::wgmma {
namespace {

constexpr std::int64_t rows_per_tile = DecodeForward::rows[0].rows();

std::int64_t tiles_of(std::int64_t rows) { return (rows + rows_per_tile - 1) / rows_per_tile; }

/// log2 of the number of heads to pack. Heads are packed if that fills tiles better by at least a fifth.
int packed_heads_log2(const AttentionProblem& problem) {
  const std::int64_t heads = packed_heads(problem);
  const bool fuller = 6 * tiles_of(problem.length_q * heads) <= 5 * tiles_of(problem.length_q) * heads;
  return fuller ? std::countr_zero(static_cast<std::uint64_t>(heads)) : 0;
}

/// The row of DecodeForward for the problem's head dims.
int decode_row_of(const AttentionProblem& problem) {
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  return first_row<DecodeForward>([&](const ForwardConfig& c) { return c.dim >= dim; });
}

/// The decode plan of a call; without splits, unless it takes less than `time_alone`, the time of the other
/// kernels.
DecodePlan decode_plan(const AttentionCall& call, int multiprocessors, double time_alone) {
  const AttentionProblem& problem = call.problem;
  if (std::max(problem.dim_qk, problem.dim_v) > most_dim_of_decode || masked(call)) return {};
  DecodePlan plan{.heads_log2 = packed_heads_log2(problem)};
  const ForwardConfig& c = DecodeForward::rows[decode_row_of(problem)];
  const Schedule whole = schedule_of(call, c, multiprocessors, {plan.heads_log2, 1});
  if (plan.heads_log2 == 0 && whole.total() >= multiprocessors) return {};

  // The last queries see the most keys.
  const BandOfKeys band = BandOfKeys::of(call);
  const int last_queries = std::max(1, c.rows() >> plan.heads_log2);
  const int key_tiles = band.tiles(std::max(0, band.length_q - last_queries), band.length_q, c.keys).count();
  const double row_time = static_cast<double>(SplitSpace::of(call, plan).rows * problem.dim_v) * 8 / 3e6;
  double least = 0;
  for (int splits = 1; splits <= std::min(most_splits, std::max(1, key_tiles)); ++splits) {
    const int rounds = (whole.total() * splits + multiprocessors - 1) / multiprocessors;
    const double combining = splits > 1 ? static_cast<double>(combine_time) + splits * row_time : 0.0;
    const int most_tiles = (key_tiles + splits - 1) / splits;
    const double time =
        rounds * static_cast<double>(c.even.start + c.even.step * static_cast<float>(most_tiles)) + combining;
    if (plan.splits == 0 || time < least) {
      least = time;
      plan.splits = splits;
    }
  }
  if (least > 0.9 * time_alone) return {};
  return plan;
}

/// A plan with at least two splits, for pieces with f32 results: only partial results of splits are f32.
DecodePlan plan_of_piece(const AttentionCall& call, int multiprocessors) {
  const DecodePlan plan = decode_plan(call, multiprocessors, std::numeric_limits<double>::infinity());
  return plan.splits > 1 ? plan : DecodePlan{.heads_log2 = packed_heads_log2(call.problem), .splits = 2};
}

}  // namespace

std::int64_t packed_heads(const AttentionProblem& problem) {
  constexpr std::int64_t most = 64;  // a consumer's rows
  const std::int64_t group = problem.heads_q / std::max<std::int64_t>(problem.heads_kv, 1);
  const AttentionFeatures& features = problem.features;
  const bool alike = !features.alibi && !features.sinks && features.mask == MaskKind::none &&
                     !features.dropout && !features.block_mask && !features.logit_scale;
  return alike && group <= most && std::has_single_bit(static_cast<std::uint64_t>(group)) ? group : 1;
}

namespace {

template <typename Table>
Choice choose_in(const AttentionCall& call, int multiprocessors) {
  const ChosenRow alone = choose_row<Table>(call, multiprocessors);
  if (!listed(call)) {
    const DecodePlan decode = decode_plan(call, multiprocessors, alone.time);
    if (decode.splits > 0) return {decode, decode_row_of(call.problem)};
  }
  return {DecodePlan{}, tuned_row<Table>(call, able_row<Table>(call), alone.row)};
}
/// `asked` is the call whose lengths count (choosing_by()).
Choice choose_anew(const AttentionCall& call, const AttentionCall& asked, int multiprocessors) {
  if (call.problem.piece.wide_rows) {
    return {plan_of_piece(call, multiprocessors), decode_row_of(call.problem)};
  }
  return listed_with_more(call)   ? choose_in<GeneralBlockForward>(asked, multiprocessors)
         : listed(call)           ? choose_in<BlockForward>(asked, multiprocessors)
         : combined(call.problem) ? choose_in<CombinedForward>(asked, multiprocessors)
         : masked(call)           ? choose_in<MaskedForward>(asked, multiprocessors)
         : general(call)          ? choose_in<GeneralForward>(asked, multiprocessors)
                                  : choose_in<Forward>(asked, multiprocessors);
}
Choice choose_anew(const AttentionCall& call, int multiprocessors) {
  return choosing_by(call,
                     [&](const AttentionCall& asked) { return choose_anew(call, asked, multiprocessors); });
}

/// Everything that a choice depends on.
struct Asked {
  AttentionProblem problem;
  std::int64_t left = 0, right = 0;  ///< of the band
  Alignment alignment = Alignment::top_left;
  std::int64_t total_q = 0;
  int multiprocessors = 0;
  std::uint32_t epoch = 0;  ///< of the tuning
  friend bool operator==(const Asked&, const Asked&) = default;
};

}  // namespace

// Calls without a plan, such as those from Python, are often the same as the previous one. Comparing takes
// 260 instructions; choosing takes 1700 to 2100 more.
Choice choose(const AttentionCall& call, int multiprocessors) {
  struct Last {
    Asked asked;
    Choice answer;
  };
  thread_local Last last;
  const Asked asked{call.problem,
                    call.band.left,
                    call.band.right,
                    call.alignment,
                    call.total_q,
                    multiprocessors,
                    tuning_epoch().load(std::memory_order_relaxed)};
  if (asked != last.asked) last = {asked, choose_anew(call, multiprocessors)};
  return last.answer;
}

}  // namespace tilewise::cuda::wgmma
