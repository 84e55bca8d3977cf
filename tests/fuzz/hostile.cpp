#include "fuzz/hostile.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

#include "fuzz/memory.h"
#include "tilewise/attention.h"

namespace tilewise::fuzz {
namespace {

constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t smallest = std::numeric_limits<std::int64_t>::min();

constexpr std::array<std::int64_t, 24> numbers = {0,
                                                  1,
                                                  -1,
                                                  2,
                                                  3,
                                                  5,
                                                  8,
                                                  17,
                                                  largest,
                                                  smallest,
                                                  largest - 1,
                                                  std::int64_t{1} << 31,
                                                  (std::int64_t{1} << 31) - 1,
                                                  std::int64_t{1} << 32,
                                                  std::int64_t{1} << 62,
                                                  (std::int64_t{1} << 62) + 1,
                                                  65536,
                                                  std::int64_t{1} << 30,
                                                  std::int64_t{1} << 40,
                                                  -2,
                                                  -3,
                                                  smallest + 1,
                                                  -(std::int64_t{1} << 32),
                                                  largest / 3};

// One of the numbers, or a neighbour or multiple of what was there.
std::int64_t changed(std::int64_t old, std::uint8_t how) {
  if (how < 128) return numbers[how % numbers.size()];
  const auto step = static_cast<std::uint64_t>(how % 8) + 1;
  const auto from = static_cast<std::uint64_t>(old);
  switch (how / 8 % 4) {
    case 0: return static_cast<std::int64_t>(from + step);
    case 1: return static_cast<std::int64_t>(from - step);
    case 2: return static_cast<std::int64_t>(from * step);
    default: return static_cast<std::int64_t>(-from);
  }
}

// Of the bytes of a mistake, in turn.
struct Details {
  std::uint8_t argument, dim, how, more;

  std::size_t which_dim() const { return dim % Tensor::max_rank; }
};

// Of the arguments that are given, and of all where none is.
Argument& pick(Call& call, std::uint8_t number) {
  std::vector<Argument*> given;
  for (Argument& argument : call.arguments) {
    if (argument.view->given()) given.push_back(&argument);
  }
  return given.empty() ? call.arguments[number % call.arguments.size()] : *given[number % given.size()];
}

void lay_by_rows(Tensor& view) {
  std::uint64_t step = 1;
  for (auto dim = static_cast<std::size_t>(std::clamp(view.rank, 0, Tensor::max_rank)); dim-- > 0;) {
    view.strides[dim] = static_cast<std::int64_t>(step);
    step *= static_cast<std::uint64_t>(std::max<std::int64_t>(view.shape[dim], 1));
  }
}

void change_extent(Call& call, const Details& d) {
  Tensor& view = *pick(call, d.argument).view;
  std::int64_t& extent = view.shape[d.which_dim()];
  extent = changed(extent, d.how);
  if (d.more % 2 == 0) lay_by_rows(view);
}

// The same extent wherever it stands, so that shapes still agree.
void change_extents(Call& call, const Details& d) {
  const std::int64_t old = pick(call, d.argument).view->shape[d.which_dim()];
  const std::int64_t now = changed(old, d.how);
  for (Argument& argument : call.arguments) {
    Tensor& view = *argument.view;
    bool any = false;
    for (int dim = 0; dim < std::clamp(view.rank, 0, Tensor::max_rank); ++dim) {
      std::int64_t& extent = view.shape[static_cast<std::size_t>(dim)];
      if (extent != old) continue;
      extent = now;
      any = true;
    }
    if (any && d.more % 4 != 0) lay_by_rows(view);
  }
}

void change_stride(Call& call, const Details& d) {
  std::int64_t& stride = pick(call, d.argument).view->strides[d.which_dim()];
  stride = changed(stride, d.how);
}

void change_rank(Call& call, const Details& d) {
  Tensor& view = *pick(call, d.argument).view;
  constexpr std::array<int, 12> ranks = {
      0, 1, 2, 3, 4, 5, 6, 7, -1, 1 << 20, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()};
  view.rank = ranks[d.how % ranks.size()];
  if (d.more % 2 == 0) lay_by_rows(view);
}

void change_dtype(Call& call, const Details& d) {
  pick(call, d.argument).view->dtype = static_cast<DType>(d.more % 4 == 0 ? d.how : d.how % 7);
}

// All tensors of a type.
void change_dtypes(Call& call, const Details& d) {
  const DType old = pick(call, d.argument).view->dtype;
  for (Argument& argument : call.arguments) {
    if (argument.view->dtype == old) argument.view->dtype = static_cast<DType>(d.how % 8);
  }
}

// Whether the library would run a call on a CUDA device, where the addresses of these tensors are no memory.
bool runs_on_cuda() {
  static const bool runs = [] {
    const std::vector<std::string_view> kernels = attention_kernels();
    return std::find(kernels.begin(), kernels.end(), "fused") != kernels.end();
  }();
  return runs;
}

void change_device(Call& call, const Details& d) {
  const Device device{static_cast<Device::Type>(d.how % 4), d.more % 3 - 1};
  if (d.dim % 4 != 0) {
    pick(call, d.argument).view->device = device;
    return;
  }
  if (device.type == Device::Type::cuda && runs_on_cuda()) return;
  call.context.device = device;
  for (Argument& argument : call.arguments) argument.view->device = device;
}

void change_address(Call& call, const Details& d) {
  Argument& argument = pick(call, d.argument);
  argument.address = d.how % 4 == 0 ? 0 : argument.address + d.how;
}

// Into the memory of another, or beside it.
void share_memory(Call& call, const Details& d) {
  Argument& argument = pick(call, d.argument);
  const Argument& other = pick(call, d.dim);
  argument.address = other.address + d.how * (d.more % 2 == 0 ? 0 : 1u);
  if (d.more % 4 < 2 && argument.view->rank == other.view->rank) *argument.view = *other.view;
}

void take_away(Call& call, const Details& d) { *pick(call, d.argument).view = {}; }

// Where another is.
void give(Call& call, const Details& d) {
  Argument& argument = call.arguments[d.argument % call.arguments.size()];
  const Argument& other = pick(call, d.dim);
  *argument.view = *other.view;
  argument.content = other.content;
  argument.address = (std::uintptr_t{1} << 48) + d.how;
}

void exchange_dims(Call& call, const Details& d) {
  Tensor& view = *pick(call, d.argument).view;
  const std::size_t a = d.which_dim(), b = d.how % Tensor::max_rank;
  std::swap(view.strides[a], view.strides[b]);
  if (d.more % 2 == 0) std::swap(view.shape[a], view.shape[b]);
}

template <typename T>
void set_element(Argument& argument, std::uint8_t where, T value) {
  const std::size_t count = argument.content.size() / sizeof(T);
  if (count == 0) return;
  std::memcpy(&argument.content[where % count * sizeof(T)], &value, sizeof(T));
}

void change_content(Call& call, const Details& d) {
  Argument& argument = pick(call, d.argument);
  const std::int64_t number = changed(d.more, d.how);
  constexpr std::array<float, 8> specials = {std::numeric_limits<float>::quiet_NaN(),
                                             std::numeric_limits<float>::infinity(),
                                             -std::numeric_limits<float>::infinity(),
                                             std::numeric_limits<float>::max(),
                                             std::numeric_limits<float>::lowest(),
                                             std::numeric_limits<float>::denorm_min(),
                                             -0.0f,
                                             1e30f};
  const float special = specials[d.how % specials.size()];
  switch (argument.view->dtype) {
    case DType::i32: set_element(argument, d.dim, static_cast<std::int32_t>(number)); break;
    case DType::i64: set_element(argument, d.dim, number); break;
    case DType::f32: set_element(argument, d.dim, special); break;
    case DType::f16: set_element(argument, d.dim, float_to_f16(special)); break;
    case DType::bf16: set_element(argument, d.dim, float_to_bf16(special)); break;
    case DType::f64: set_element(argument, d.dim, static_cast<double>(special)); break;
    default: set_element(argument, d.dim, d.how);
  }
}

void change_options(Call& call, const Details& d) {
  if (!call.mistakes.empty()) call.mistakes[d.argument % call.mistakes.size()](d.how);
}

void change_context(Call& call, const Details& d) {
  constexpr std::array<int, 6> threads = {
      0, -1, std::numeric_limits<int>::max(), std::numeric_limits<int>::min(), 64, 1 << 20};
  constexpr std::array<std::string_view, 5> levels = {"avx512", "sse4", "avx2", "neon", "no such level"};
  switch (d.dim % 3) {
    case 0: call.context.parallel_for.threads = threads[d.how % threads.size()]; break;
    case 1: call.context.parallel_for.run = nullptr; break;
    default: call.context.simd_level = levels[d.how % levels.size()];
  }
}

constexpr std::array<void (*)(Call&, const Details&), 16> mistakes = {
    change_extent,  change_extents, change_stride,  change_rank,   change_dtype, change_dtypes,
    change_device,  change_address, share_memory,   take_away,     give,         exchange_dims,
    change_content, change_content, change_options, change_context};

}  // namespace

void make_mistake(Call& call, const std::array<std::uint8_t, mistake_bytes>& bytes) {
  mistakes[bytes[0] % mistakes.size()](call, {bytes[1], bytes[2], bytes[3], bytes[4]});
}

}  // namespace tilewise::fuzz
