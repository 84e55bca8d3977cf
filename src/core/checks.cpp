#include "core/checks.h"

#include "core/overlap.h"

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

}  // namespace

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
    const std::int64_t bytes = tensor.stride(dim) * width;
    if (tensor.extent(dim) > 1 && (bytes < 0 || bytes % 16 != 0)) return false;
  }
  return true;
}

void check_context(const Context& context) {
  if (context.device.type == Device::Type::cpu) {
    check(context.parallel_for.threads >= 1, "parallel_for.threads", "1 or more",
          context.parallel_for.threads);
    check(context.parallel_for.run != nullptr, "parallel_for.run", "a function", "none");
  }
  check_simd_level(context.simd_level);
}

void check_written(std::span<const Named> written, std::span<const Named> read) {
  for (const Named& output : written) {
    if (!output.tensor->given()) continue;
    check(!overlaps_itself(*output.tensor), output.name, "a view whose elements are all apart",
          "strides that overlap");
    const auto check_apart = [&](const Named& other) {
      const bool apart = !other.tensor->given() || !may_overlap(*output.tensor, *other.tensor);
      check(apart, output.name, [&] { return "memory apart from " + std::string(other.name); }, "an overlap");
    };
    for (const Named& input : read) check_apart(input);
    for (const Named* other = written.data(); other != &output; ++other) check_apart(*other);
  }
}

}  // namespace tilewise
