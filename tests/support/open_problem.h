#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/random_problem.h"

namespace tilewise::test {

/// The results of both passes, each in row-major order.
struct Results {
  std::vector<double> o, lse, dq, dk, dv, dmask, dsinks, dlogit_scale;
  static const std::array<std::vector<double> Results::*, 8> members;

  /// The results as if every row were empty.
  explicit Results(const RandomProblem& problem);
  Results() = default;
};

/// One query head of one entry in plain arrays, without strides, layouts or broadcasting. It shares no code
/// with the library, so that the two implementations of the contract check each other.
struct Head {
  std::size_t queries = 0;
  std::size_t keys = 0;
  std::size_t head = 0;
  std::vector<const double*> q, d_o;  ///< [queries] rows
  std::vector<const double*> k, v;    ///< [keys] rows
  std::vector<double> d_lse;          ///< [queries]
  std::vector<char> visible;          ///< [queries, keys]
  std::vector<double> alibi;          ///< [queries, keys] added to the score; empty without ALiBi
  std::vector<double> mask;           ///< [queries, keys] added to the score; empty without an additive mask
  std::vector<double> keep;           ///< [queries, keys] factor of dropout; empty without dropout
  double sink = 0;                    ///< -inf without sinks
  double logit_scale = 1;             ///< factor of scale·q·k

  // The indices of rows and elements in Results.
  std::vector<std::size_t> query_row;   ///< [queries] row of o and dq
  std::vector<std::size_t> statistic;   ///< [queries] element of lse
  std::vector<std::size_t> key_row;     ///< [keys] row of dk and dv
  std::vector<std::size_t> mask_index;  ///< [queries, keys] element of dmask; empty without additive mask

  std::size_t pair(std::size_t i, std::size_t j) const { return i * keys + j; }
  double alibi_at(std::size_t pair) const { return alibi.empty() ? 0 : alibi[pair]; }
  double mask_at(std::size_t pair) const { return mask.empty() ? 0 : mask[pair]; }
  double keep_at(std::size_t pair) const { return keep.empty() ? 1 : keep[pair]; }
};

inline constexpr std::array<std::vector<double> Results::*, 8> Results::members = {
    &Results::o,  &Results::lse,   &Results::dq,     &Results::dk,
    &Results::dv, &Results::dmask, &Results::dsinks, &Results::dlogit_scale};

class OpenProblem {
 public:
  explicit OpenProblem(const RandomProblem& problem);

  const RandomProblem& problem;
  double scale;
  std::size_t dim_qk;
  std::size_t dim_v;

  /// A problem whose values differ from these by about a thousandth, rounded to their types, and in which
  /// queries, keys and head dims have another order, on which sums depend. Equal values stay equal. Truth and
  /// conditioning are nearly the same, but rounding errors are independent.
  OpenProblem neighbour(std::uint64_t seed) const;

  /// Calls body(head) for every query head of every entry.
  template <typename Body>
  void for_each_head(const Body& body) const {
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      for (std::int64_t h = 0; h < problem.heads_q; ++h) body(head(b, h));
    }
  }

 private:
  struct Entry;  // the rows of a batch entry or sequence
  Entry entry(std::int64_t b) const;
  Head head(std::int64_t b, std::int64_t h) const;
  bool band_shows(const Entry& entry, std::int64_t i, std::int64_t j) const;
  struct BlockTable;  // the state of each block in a head's block mask
  BlockTable block_table(std::int64_t b, std::int64_t h) const;
  bool block_shows(BlockTable& table, std::int64_t i, std::int64_t j) const;
  std::size_t mask_index(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;

  std::vector<double> q_, k_, v_, d_o_, d_lse_, mask_, alibi_, sinks_, logit_scale_;
  std::uint64_t order_ = 0;  // seed of the order of queries and keys in a head; 0: unchanged
};

}  // namespace tilewise::test
