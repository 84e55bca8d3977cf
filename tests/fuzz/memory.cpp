#include "fuzz/memory.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <span>

#if defined(__SANITIZE_ADDRESS__)
#define TILEWISE_FUZZ_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TILEWISE_FUZZ_ASAN 1
#endif
#endif
#if defined(TILEWISE_FUZZ_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#endif

namespace tilewise::fuzz {
namespace {

constexpr std::size_t alignment = 64;
constexpr std::int64_t most_bytes = 1 << 20;
constexpr std::int64_t most_elements = (1 << 16) - 1;
// What has no memory points here, where nobody's memory is.
constexpr std::uintptr_t nowhere = alignment;

// A type that nobody knows has bytes.
std::size_t width_of(const Tensor& view) { return view.dtype <= DType::i64 ? size_of(view.dtype) : 1; }

int dims_of(const Tensor& view) { return std::clamp(view.rank, 0, Tensor::max_rank); }

void fill_with_noise(std::byte* data, std::size_t bytes, std::uint64_t variant) {
  std::array<std::uint64_t, 64> pattern{};
  for (std::uint64_t& word : pattern) {
    word = (variant + 1) * 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(&word - pattern.data() + 1);
    word ^= word >> 29;
  }
  for (std::size_t n = 0; n < bytes; n += sizeof pattern) {
    std::memcpy(data + n, pattern.data(), std::min(sizeof pattern, bytes - n));
  }
}

// Calls body with the byte offset of every element, the last index fastest.
template <typename Body>
void for_each_element(const Tensor& view, const Body& body) {
  if (is_empty(view)) return;
  const auto width = static_cast<std::int64_t>(width_of(view));
  const int dims = dims_of(view);
  Tensor::Extents index{};
  std::int64_t offset = 0;
  while (true) {
    body(offset * width);
    int dim = dims - 1;
    for (; dim >= 0; --dim) {
      if (view.extent(dim) == 1) continue;  // its stride may be anything
      auto& i = index[static_cast<std::size_t>(dim)];
      offset += view.stride(dim);
      if (++i < view.extent(dim)) break;
      offset -= view.extent(dim) * view.stride(dim);
      i = 0;
    }
    if (dim < 0) return;
  }
}

std::int64_t elements_of(const Tensor& view) {
  std::int64_t count = 1;
  for (int dim = 0; dim < dims_of(view); ++dim) count *= view.extent(dim);
  return count;
}

void append_elements(const Tensor& view, const std::byte* data, std::vector<std::byte>& to) {
  const std::size_t width = width_of(view);
  std::size_t next = to.size();
  if (is_empty(view)) return;
  to.resize(next + static_cast<std::size_t>(elements_of(view)) * width);
  for_each_element(view, [&](std::int64_t offset) {
    std::memcpy(&to[next], data + offset, width);
    next += width;
  });
}

void* allocate(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, std::max<std::size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  return memory;
}

}  // namespace

std::string to_string(const Call& call) {
  std::string text = call.name;
  for (const Argument& argument : call.arguments) {
    const Tensor& view = *argument.view;
    if (!view.given()) continue;
    text += "\n  " + std::string(argument.name) + ": " + std::string(to_string(view.dtype)) + " rank " +
            std::to_string(view.rank) + " [";
    for (int dim = 0; dim < dims_of(view); ++dim) {
      text += (dim > 0 ? ", " : "") + std::to_string(view.extent(dim)) + " by " +
              std::to_string(view.stride(dim));
    }
    text += "] at " + std::to_string(argument.address) + (argument.address == 0 ? " (null)" : "") + " on " +
            to_string(view.device);
  }
  text += "\n  threads " + std::to_string(call.context.parallel_for.threads) + ", level '" +
          std::string(call.context.simd_level) + "', kernel '" +
          (call.kernel == nullptr ? "" : std::string(*call.kernel)) + "'";
  return text;
}

void fail(const Call& call, const std::string& text) {
  std::fprintf(stderr, "FAILED: %s\n%s\n", text.c_str(), to_string(call).c_str());
  std::abort();
}

bool is_empty(const Tensor& view) {
  for (int dim = 0; dim < dims_of(view); ++dim) {
    if (view.extent(dim) <= 0) return true;
  }
  return false;
}

std::optional<Span> span_of(const Tensor& view) {
  if (is_empty(view)) return Span{};
  const auto width = static_cast<std::int64_t>(width_of(view));
  Span span{0, width};
  std::int64_t elements = 1;
  for (int dim = 0; dim < dims_of(view); ++dim) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(elements, view.extent(dim), &elements) || elements > most_elements) return {};
    if (__builtin_mul_overflow(view.extent(dim) - 1, view.stride(dim), &reach)) return {};
    if (reach > most_bytes || reach < -most_bytes) return {};
    (reach < 0 ? span.first : span.end) += reach * width;
  }
  if (span.end - span.first > most_bytes) return {};
  return span;
}

bool has_repeated_element(const Tensor& view) {
  std::vector<std::byte> bytes;
  append_elements(view, static_cast<const std::byte*>(view.data), bytes);
  const std::size_t width = width_of(view);
  std::set<std::vector<std::byte>> seen;
  for (auto at = bytes.begin(); at != bytes.end(); at += static_cast<std::ptrdiff_t>(width)) {
    if (!seen.emplace(at, at + static_cast<std::ptrdiff_t>(width)).second) return true;
  }
  return false;
}

bool take_contents(Call& call) {
  struct Range {
    std::uintptr_t first, end;
    std::vector<Argument*> arguments;
  };
  std::vector<Range> ranges;
  for (Argument& argument : call.arguments) {
    const Tensor& view = *argument.view;
    if (!view.given() || view.data == nullptr) continue;
    const std::optional<Span> span = span_of(view);
    if (!span) return false;
    const auto* data = static_cast<const std::byte*>(view.data);
    append_elements(view, data, argument.content);
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    Range range{address + static_cast<std::uintptr_t>(span->first),
                address + static_cast<std::uintptr_t>(span->end),
                {&argument}};
    std::erase_if(ranges, [&](Range& other) {
      if (other.end <= range.first || range.end <= other.first) return false;
      range.first = std::min(range.first, other.first);
      range.end = std::max(range.end, other.end);
      range.arguments.insert(range.arguments.end(), other.arguments.begin(), other.arguments.end());
      return true;
    });
    ranges.push_back(std::move(range));
  }
  // In the order of their first argument, apart from each other, each as well aligned as it was.
  for (Range& range : ranges) std::sort(range.arguments.begin(), range.arguments.end());
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.arguments.front() < b.arguments.front(); });
  std::uintptr_t base = 0;
  for (const Range& range : ranges) {
    base += std::uintptr_t{1} << 32;
    for (Argument* argument : range.arguments) {
      const auto address = reinterpret_cast<std::uintptr_t>(argument->view->data);
      argument->address = base + range.first % alignment + (address - range.first);
    }
  }
  return true;
}

// Neighbours in memory of arguments that overlap.
struct Memory::Block {
  std::uintptr_t address = 0;  // the number that stands for its first byte
  std::size_t lead = 0;        // bytes before that, which belong to nobody
  std::size_t bytes = 0;
  std::byte* memory = nullptr;
  std::vector<const Argument*> arguments{};
  std::vector<std::byte> before{};

  std::byte* at(std::uintptr_t number) const { return memory + lead + (number - address); }
};

Memory::Memory(Call& call, std::uint64_t variant) : call_(call) {
  std::vector<Argument*> placed;
  for (Argument& argument : call.arguments) {
    Tensor& view = *argument.view;
    view.data = nullptr;
    if (!view.given() || argument.address == 0) continue;
    const bool possible = span_of(view).has_value();
    if (possible && !is_empty(view)) {
      placed.push_back(&argument);
    } else if (possible || (view.dtype != DType::i32 && view.dtype != DType::i64)) {
      view.data = reinterpret_cast<void*>(nowhere);  // what is checked, but not looked at
    }
  }
  place(std::move(placed), variant);
}

void Memory::place(std::vector<Argument*> placed, std::uint64_t variant) {
  const auto first_of = [](const Argument* a) {
    return a->address + static_cast<std::uintptr_t>(span_of(*a->view)->first);
  };
  const auto end_of = [](const Argument* a) {
    return a->address + static_cast<std::uintptr_t>(span_of(*a->view)->end);
  };
  std::stable_sort(placed.begin(), placed.end(),
                   [&](const Argument* a, const Argument* b) { return first_of(a) < first_of(b); });
  for (const Argument* argument : placed) {
    const std::uintptr_t first = first_of(argument), end = end_of(argument);
    if (blocks_.empty() || blocks_.back().address + blocks_.back().bytes <= first) {
      blocks_.push_back({.address = first, .lead = first % alignment});
    }
    Block& block = blocks_.back();
    block.bytes = std::max<std::size_t>(block.bytes, end - block.address);
    block.arguments.push_back(argument);
  }
  for (Block& block : blocks_) {
    block.memory = static_cast<std::byte*>(allocate(block.lead + block.bytes));
    fill_with_noise(block.memory, block.lead + block.bytes, variant);
    for (const Argument* argument : block.arguments) {
      std::byte* const data = block.at(argument->address);
      argument->view->data = data;
      if (!argument->reads()) continue;
      constexpr std::array<std::byte, 8> zeros{};
      const std::size_t width = width_of(*argument->view);
      const bool any = argument->content.size() >= width;
      const std::span<const std::byte> content = any ? std::span(argument->content) : std::span(zeros);
      std::size_t next = 0;
      for_each_element(*argument->view, [&](std::int64_t offset) {
        if (next + width > content.size()) next = 0;
        std::memcpy(data + offset, &content[next], width);
        next += width;
      });
    }
    block.before.assign(block.memory + block.lead, block.memory + block.lead + block.bytes);
    ASAN_POISON_MEMORY_REGION(block.memory, block.lead);
  }
}

Memory::~Memory() {
  for (const Block& block : blocks_) {
    ASAN_UNPOISON_MEMORY_REGION(block.memory, block.lead);
    std::free(block.memory);
  }
}

std::string Memory::damage(bool may_write) const {
  for (const Block& block : blocks_) {
    const std::byte* const now = block.memory + block.lead;
    if (std::memcmp(now, block.before.data(), block.bytes) == 0) continue;
    if (!may_write) return std::string(block.arguments.front()->name);
    std::vector<char> allowed(block.bytes);
    for (const Argument* argument : block.arguments) {
      if (!argument->writes()) continue;
      const auto first = static_cast<std::int64_t>(argument->address - block.address);
      const std::size_t width = width_of(*argument->view);
      for_each_element(*argument->view, [&](std::int64_t offset) {
        std::fill_n(&allowed[static_cast<std::size_t>(first + offset)], width, char{1});
      });
    }
    for (std::size_t n = 0; n < block.bytes; ++n) {
      if (now[n] != block.before[n] && !allowed[n]) return std::string(block.arguments.front()->name);
    }
  }
  return {};
}

std::vector<std::byte> Memory::results() const {
  std::vector<std::byte> results;
  for (const Argument& argument : call_.arguments) {
    const Tensor& view = *argument.view;
    if (!argument.writes() || !view.given() || is_empty(view) || !span_of(view)) continue;
    const auto* data = static_cast<const std::byte*>(view.data);
    if (data != nullptr) append_elements(view, data, results);
  }
  return results;
}

ScratchMemory::ScratchMemory(std::size_t bytes, std::uint64_t variant)
    : memory_(allocate(bytes + 1)), data_(static_cast<std::byte*>(memory_) + 1) {
  fill_with_noise(data_, bytes, variant);
}

ScratchMemory::~ScratchMemory() { std::free(memory_); }

}  // namespace tilewise::fuzz
