#include "core/overlap.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <span>

#include "core/sizes.h"

namespace tilewise {
namespace {

// Something added 0 to `most` times.
struct Term {
  std::int64_t step;
  std::int64_t most;
};

// Terms, largest step first.
template <std::size_t capacity>
struct Terms {
  std::array<Term, capacity> at{};
  std::size_t count = 0;

  void insert(const Term& term) {
    std::size_t n = count++;
    for (; n > 0 && at[n - 1].step < term.step; --n) at[n] = at[n - 1];
    at[n] = term;
  }
};

// The elements from the first to the last in memory, in bytes.
struct Range {
  std::intptr_t first;
  std::intptr_t end;
  bool bounded;  // small enough for sums over two views to stay in 64 bits, as all memory is
};

Range range_of(const Tensor& tensor) {
  constexpr std::int64_t limit = std::int64_t{1} << 56;
  const auto width = static_cast<std::intptr_t>(size_of(tensor.dtype));
  Range range{reinterpret_cast<std::intptr_t>(tensor.data), 0, true};
  range.end = range.first + width;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(tensor.extent(dim) - 1, tensor.stride(dim), &reach) || reach > limit ||
        reach < -limit) {
      range.bounded = false;
      break;
    }
    (reach < 0 ? range.first : range.end) += reach * width;
  }
  return range;
}

// The dimensions of a bounded view that move, turned so that no stride is negative. Steps count elements.
struct Box {
  Terms<Tensor::max_rank> terms;
  bool repeats = false;  // whether a dimension has stride 0

  explicit Box(const Tensor& tensor) {
    for (int dim = 0; dim < tensor.rank; ++dim) {
      if (tensor.extent(dim) <= 1) continue;
      repeats = repeats || tensor.stride(dim) == 0;
      if (tensor.stride(dim) != 0) terms.insert({std::abs(tensor.stride(dim)), tensor.extent(dim) - 1});
    }
  }
  std::span<const Term> dims() const { return {terms.at.data(), terms.count}; }
};

// The numbers that a choice of how often to add each term makes.
class Sums {
 public:
  void add(std::int64_t step, std::int64_t most) {
    if (most > 0) added_.insert({step, most});
  }

  // Whether `target` is one of them. A question that takes more steps than are left is answered with yes.
  bool contain(std::int64_t target, int& steps_left) {
    prepare();
    return contain(first_, target, steps_left);
  }

 private:
  static constexpr std::size_t capacity = 2 * Tensor::max_rank + 1;

  // Terms that leave no gap become one: with steps of 1 added up to 7 times, steps of 8 only lengthen the
  // range.
  void prepare() {
    for (std::size_t n = added_.count; n-- > 0;) {
      const Term& term = added_.at[n];
      if (first_ < capacity) {
        Term& inner = terms_[first_];
        const std::int64_t ratio = term.step / inner.step;
        if (term.step % inner.step == 0 && inner.most >= ratio - 1) {
          inner.most += term.most * ratio;
          continue;
        }
      }
      terms_[--first_] = term;
    }
    for (std::size_t n = capacity; n-- > first_;) {
      reach_[n] = reach_[n + 1] + terms_[n].step * terms_[n].most;
      divisor_[n] = std::gcd(divisor_[n + 1], terms_[n].step);
    }
  }

  bool contain(std::size_t from, std::int64_t target, int& steps_left) const {
    if (--steps_left < 0) return true;
    if (target < 0 || target > reach_[from]) return false;
    if (target == 0) return true;
    if (target % divisor_[from] != 0) return false;
    if (from + 1 == capacity) return true;
    const Term& term = terms_[from];
    const std::int64_t inside = reach_[from + 1];
    const std::int64_t most = std::min(target / term.step, term.most);
    const std::int64_t least = target <= inside ? 0 : (target - inside + term.step - 1) / term.step;
    for (std::int64_t n = most; n >= least; --n) {
      if (contain(from + 1, target - n * term.step, steps_left)) return true;
    }
    return false;
  }

  Terms<capacity> added_;
  std::array<Term, capacity> terms_{};  // the prepared ones, from first_ on
  std::size_t first_ = capacity;
  // Of those from n on: the largest sum, and what divides every sum.
  std::array<std::int64_t, capacity + 1> reach_{}, divisor_{};
};

// Slices of one buffer take tens of steps; this many take well below a millisecond.
constexpr int max_steps = 10'000;

}  // namespace

bool may_overlap(const Tensor& a, const Tensor& b) {
  const Range x = range_of(a), y = range_of(b);
  const bool bounded = x.bounded && y.bounded;
  if (bounded && (x.end <= y.first || y.end <= x.first)) return false;  // as most are
  if (is_empty(a) || is_empty(b)) return false;
  if (!bounded) return true;
  // A byte of a at the place of a byte of b. Counted in b from the end, the terms of both have one sign.
  Sums sums;
  for (const Tensor* tensor : {&a, &b}) {
    const auto width = static_cast<std::int64_t>(size_of(tensor->dtype));
    const Box box(*tensor);
    for (const Term& term : box.dims()) sums.add(term.step * width, term.most);
  }
  sums.add(1, static_cast<std::int64_t>(size_of(a.dtype) + size_of(b.dtype)) - 2);
  int steps_left = max_steps;
  return sums.contain(y.end - 1 - x.first, steps_left);
}

bool overlaps_itself(const Tensor& tensor) {
  if (is_empty(tensor)) return false;
  if (!range_of(tensor).bounded) return true;
  const Box box(tensor);
  if (box.repeats) return true;
  // Two indices of one element differ first, from the largest stride on, in some dimension, there by 1 or
  // more; the dimensions inside make up for that.
  const std::span<const Term> dims = box.dims();
  std::int64_t inside = 0;
  int steps_left = max_steps;
  for (std::size_t dim = dims.size(); dim-- > 0;) {
    const Term& first = dims[dim];
    if (inside >= first.step) {
      Sums sums;
      sums.add(first.step, first.most - 1);
      for (const Term& term : dims.subspan(dim + 1)) sums.add(term.step, 2 * term.most);
      if (sums.contain(inside - first.step, steps_left)) return true;
    }
    inside += first.step * first.most;
  }
  return false;
}

}  // namespace tilewise
