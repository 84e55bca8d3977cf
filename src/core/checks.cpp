#include "core/checks.h"

#include <cmath>

#include "core/overlap.h"
#include "core/sizes.h"

namespace tilewise {
namespace {

void check_simd_level(std::string_view level) {
  if (level.empty()) return;
  std::string names;
  for (std::string_view name : simd_levels()) {
    if (name == level) return;
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  reject("simd_level", "one of " + names + " on this machine", "'" + std::string(level) + "'");
}

// The number of elements of a tensor and the memory that its strides span. They are f64, in which nothing
// overflows; rounding only affects sizes far above the limit. An extent of 0 counts as 1. The stride of a
// dimension of extent 1 counts, too, since kernels multiply by it.
struct Span {
  bool negative = false;
  bool empty = false;
  double elements = 1;
  double reach = 1;  // an upper bound on the distance from the first element in memory to the last

  explicit Span(const Tensor& tensor) {
    for (int dim = 0; dim < tensor.rank; ++dim) {
      const std::int64_t extent = tensor.extent(dim);
      negative = negative || extent < 0;
      empty = empty || extent == 0;
      const auto factor = static_cast<double>(extent == 0 ? 1 : extent);
      elements *= factor;
      reach += factor * std::abs(static_cast<double>(tensor.stride(dim)));
    }
  }
  bool below(double bytes, DType dtype) const {
    const double limit = bytes / static_cast<double>(size_of(dtype));
    return elements < limit && reach < limit;
  }
};

bool same_form(const Tensor& planned, const Tensor& tensor) {
  return planned.dtype == tensor.dtype && planned.device == tensor.device && same_shape(planned, tensor) &&
         std::equal(planned.strides.begin(), planned.strides.begin() + planned.rank, tensor.strides.begin());
}

std::string with_strides(const Tensor& tensor) {
  Tensor strides = tensor;
  strides.shape = tensor.strides;
  return to_string(tensor) + " with strides " + shape_string(strides);
}

}  // namespace

void check_memory(const Tensor& tensor, std::string_view name, const Context& context) {
  check(tensor.rank >= 0 && tensor.rank <= Tensor::max_rank, name, "at most 5 dimensions", tensor);
  check_enumerator(tensor.dtype, DType::i64, name, "a known element type");
  const Span span(tensor);
  check(!span.negative, name, "no negative extent", tensor);
  check(
      tensor.device == context.device, name, [&] { return "memory on " + to_string(context.device); },
      [&] { return to_string(tensor.device); });
  check(span.below(0x1p56, tensor.dtype), name, "a view of fewer than 2^56 bytes",
        [&] { return with_strides(tensor); });
  if (span.empty) return;
  check(tensor.data != nullptr, name, "data", [&] { return "null data with " + to_string(tensor); });
  const std::size_t width = size_of(tensor.dtype);
  check((reinterpret_cast<std::uintptr_t>(tensor.data) & (width - 1)) == 0, name,
        [&] { return "memory aligned to " + std::to_string(width) + " bytes"; }, "an unaligned address");
}

bool same_view(const Tensor& a, const Tensor& b) {
  if (!a.given() || a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int dim = 0; dim < a.rank; ++dim) {
    if (a.extent(dim) != b.extent(dim)) return false;
    if (a.extent(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

bool has_aligned_rows(const Tensor& tensor) {
  const auto width = static_cast<std::int64_t>(size_of(tensor.dtype));
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % 16 != 0) return false;
  for (int dim = 0; dim < tensor.rank - 1; ++dim) {
    if (tensor.extent(dim) <= 1) continue;  // its stride is never used
    const std::int64_t bytes = tensor.stride(dim) * width;
    if (bytes < 0 || bytes % 16 != 0) return false;
  }
  return true;
}

bool has_aligned_strides(const Tensor& tensor) {
  for (int dim = 0; dim < tensor.rank - 1; ++dim) {
    if (tensor.stride(dim) * static_cast<std::int64_t>(size_of(tensor.dtype)) % 16 != 0) return false;
  }
  return true;
}

void check_context(const Context& context) {
  check_enumerator(context.device.type, Device::Type::cuda, "device.type", "cpu or cuda");
  if (context.device.type == Device::Type::cpu) {
    check(context.parallel_for.threads >= 1, "parallel_for.threads", "1 or more",
          context.parallel_for.threads);
    check(context.parallel_for.run != nullptr, "parallel_for.run", "a function", "none");
  }
  check_simd_level(context.simd_level);
}

void check_same_forms(std::span<const Named> planned, std::span<const Named> given) {
  constexpr std::uintptr_t most_alignment = 16;
  for (std::size_t n = 0; n < planned.size(); ++n) {
    const Tensor& before = *planned[n].tensor;
    const Tensor& now = *given[n].tensor;
    const std::string_view name = given[n].name;
    if (!before.given() && !now.given()) continue;
    check(before.given(), name, "none, as planned", now);
    check(now.given(), name, [&] { return to_string(before) + ", as planned"; }, now);
    check(
        same_form(before, now), name,
        [&] { return with_strides(before) + " on " + to_string(before.device) + ", as planned"; },
        [&] { return with_strides(now) + " on " + to_string(now.device); });
    if (before.data == nullptr) continue;  // the tensor has no elements
    const auto address = reinterpret_cast<std::uintptr_t>(before.data) | most_alignment;
    const std::uintptr_t alignment = address & -address;
    check(now.data != nullptr, name, "data", [&] { return "null data with " + to_string(now); });
    check((reinterpret_cast<std::uintptr_t>(now.data) & (alignment - 1)) == 0, name,
          [&] { return "memory aligned to " + std::to_string(alignment) + " bytes, as planned"; },
          "an unaligned address");
  }
}

void check_written(std::span<const Named> written, std::span<const Named> read) {
  for (const Named& output : written) {
    if (!output.tensor->given()) continue;
    check(!overlaps_itself(*output.tensor), output.name, "elements that do not overlap",
          "strides that overlap");
    const auto check_apart = [&](const Named& other) {
      const bool apart = !other.tensor->given() || !may_overlap(*output.tensor, *other.tensor);
      check(
          apart, output.name, [&] { return "memory that does not overlap " + std::string(other.name); },
          "an overlap");
    };
    for (const Named& input : read) check_apart(input);
    for (const Named* other = written.data(); other != &output; ++other) check_apart(*other);
  }
}

}  // namespace tilewise
