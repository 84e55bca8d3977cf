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

// Whether two views overlap is a question about integers: views share a byte if a sum of strides, each
// multiplied by an index within its extent, equals a given number. Sums answers it by depth-first search over
// the terms.

// The multiples of `step` from 0 to `most` · step.
struct Term {
  std::int64_t step;
  std::int64_t most;
};

// Terms in descending order of their steps.
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

// The addresses from the first byte of a view to the end of its last element.
struct Range {
  std::intptr_t first;
  std::intptr_t end;
  bool bounded;  // sums over two such views fit in 64 bits, as for all real memory
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

// The dimensions of a bounded view with an extent above 1 and a stride other than 0, reversed where the
// stride is negative. Steps count elements.
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

// The set of all sums of one multiple of each term.
class Sums {
 public:
  void add(std::int64_t step, std::int64_t most) {
    if (most > 0) added_.insert({step, most});
  }

  // Whether `target` is in the set. If the search needs more than `steps_left` steps, the answer is true.
  bool contain(std::int64_t target, int& steps_left) {
    prepare();
    return contain(first_, target, steps_left);
  }

 private:
  static constexpr std::size_t capacity = 2 * Tensor::max_rank + 1;

  // Merges terms that together leave no gap: with the multiples of 1 up to 7, the multiples of 8 only make
  // the range of sums longer.
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
  std::array<Term, capacity> terms_{};  // after merging, from first_ on
  std::size_t first_ = capacity;
  // For the terms from n on: the largest sum, and the greatest common divisor of all sums.
  std::array<std::int64_t, capacity + 1> reach_{}, divisor_{};
};

// Slices of one buffer take tens of steps. This many take well below a millisecond.
constexpr int max_steps = 10'000;

}  // namespace

bool may_overlap(const Tensor& a, const Tensor& b) {
  const Range x = range_of(a), y = range_of(b);
  const bool bounded = x.bounded && y.bounded;
  if (bounded && (x.end <= y.first || y.end <= x.first)) return false;  // the usual case
  if (is_empty(a) || is_empty(b)) return false;
  if (!bounded) return true;
  // Is there a byte of a at the address of a byte of b? Bytes of a are counted from its first address
  // upwards, bytes of b from its last address downwards, so that all terms are positive.
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
  // Suppose that two indices name one element. Take the dimension with the largest stride in which they
  // differ: there they differ by 1 or more, and the dimensions with smaller strides must compensate for that
  // difference.
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
