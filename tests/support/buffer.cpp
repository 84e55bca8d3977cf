#include "support/buffer.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "core/load.h"

namespace tilewise::test {

struct AlignedDelete {
  static constexpr std::size_t alignment = 64;
  void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t{alignment}); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;

namespace {

constexpr std::size_t alignment = AlignedDelete::alignment;
constexpr std::size_t guard_bytes = 128;
// In words this is 0x7FFF, 0x7FFF7FFF, …: NaN in f16, bf16, f32 and f64, and different from the poison.
constexpr std::byte guard_pattern[2] = {std::byte{0xFF}, std::byte{0x7F}};
constexpr std::byte poison_pattern{0xFF};

AlignedBytes allocate(std::size_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{alignment})));
}

bool contains(const std::vector<int>& dims, std::size_t dim) {
  return std::find(dims.begin(), dims.end(), static_cast<int>(dim)) != dims.end();
}

std::size_t bytes_of(std::int64_t elements, DType dtype) {
  return static_cast<std::size_t>(elements) * size_of(dtype);
}

}  // namespace

// An allocation filled with the guard pattern, in which one or several buffers have their elements.
struct Buffer::Storage {
  std::size_t bytes;
  AlignedBytes data;
  std::vector<std::byte> taken;  // 0xFF where a byte belongs to an element

  explicit Storage(std::size_t inner) : bytes(inner + 2 * guard_bytes), data(allocate(bytes)), taken(bytes) {
    std::memcpy(data.get(), guard_pattern, sizeof guard_pattern);
    for (std::size_t filled = sizeof guard_pattern; filled < bytes; filled *= 2) {
      std::memcpy(&data[filled], data.get(), std::min(filled, bytes - filled));
    }
  }
};

Buffer::Buffer(DType dtype, Shape shape, const Placement& placement)
    : dtype_(dtype), shape_(std::move(shape)) {
  const std::size_t rank = shape_.size();
  std::vector<int> order = placement.order;
  if (order.empty()) {
    order.resize(rank);
    std::iota(order.begin(), order.end(), 0);
  }
  strides_.resize(rank);
  std::int64_t span = placement.step;
  std::int64_t first = placement.lead;
  for (auto it = order.rbegin(); it != order.rend(); ++it) {
    const auto dim = static_cast<std::size_t>(*it);
    if (contains(placement.expanded, dim)) continue;
    const std::int64_t padding = dim < placement.padding.size() ? placement.padding[dim] : 0;
    strides_[dim] = span;
    if (contains(placement.flipped, dim)) {
      first += std::max<std::int64_t>(0, shape_[dim] - 1) * span;
      strides_[dim] = -span;
    }
    span *= std::max<std::int64_t>(1, shape_[dim] + padding);
  }
  place(std::make_shared<Storage>(bytes_of(placement.lead + span, dtype)), first);
}

std::vector<Buffer> Buffer::side_by_side(DType dtype, std::span<const Shape> shapes) {
  std::int64_t token = 0;  // elements per token
  for (const Shape& shape : shapes) token += shape[1] * shape.back();
  const Shape& shape = shapes.front();
  const std::int64_t tokens = shape.size() == 3 ? shape[0] : shape[0] * shape[2];
  const auto storage = std::make_shared<Storage>(bytes_of(tokens * token, dtype));
  std::vector<Buffer> buffers;
  std::int64_t first = 0;
  for (const Shape& slice : shapes) {
    const std::int64_t dim = slice.back();
    Buffer buffer;
    buffer.dtype_ = dtype;
    buffer.shape_ = slice;
    buffer.strides_ = slice.size() == 3 ? Shape{token, dim, 1} : Shape{slice[2] * token, dim, token, 1};
    buffer.place(storage, first);
    buffers.push_back(std::move(buffer));
    first += slice[1] * dim;
  }
  return buffers;
}

void Buffer::place(std::shared_ptr<Storage> storage, std::int64_t first) {
  storage_ = std::move(storage);
  const std::size_t start = guard_bytes + bytes_of(first, dtype_);
  data_ = storage_->data.get() + start;
  std::byte* taken = storage_->taken.data() + start;
  for_each_run([&](std::int64_t offset, std::int64_t length) {
    std::memset(taken + offset, 0xFF, static_cast<std::size_t>(length));
  });
  poison();
}

Tensor Buffer::view() const {
  if (!given()) return {};
  return Tensor(size() == 0 ? nullptr : data_, dtype_, shape_, strides_);
}

std::int64_t Buffer::size() const {
  return std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t Buffer::offset_of(std::span<const std::int64_t> index) const {
  if (index.size() != shape_.size()) throw std::out_of_range("index of the wrong rank");
  std::int64_t offset = 0;
  for (std::size_t dim = 0; dim < shape_.size(); ++dim) {
    if (index[dim] < 0 || index[dim] >= shape_[dim]) throw std::out_of_range("index outside the shape");
    offset += index[dim] * strides_[dim];
  }
  return offset;
}

double Buffer::load(std::int64_t offset) const { return load_element(data_, dtype_, offset); }

void Buffer::store(std::int64_t offset, double value) {
  if (dtype_ == DType::boolean) {
    data_[offset] = std::byte{value != 0};
  } else if (dtype_ == DType::i32) {
    reinterpret_cast<std::int32_t*>(data_)[offset] = static_cast<std::int32_t>(value);
  } else if (dtype_ == DType::i64) {
    reinterpret_cast<std::int64_t*>(data_)[offset] = static_cast<std::int64_t>(value);
  } else {
    store_element(data_, dtype_, offset, value);
  }
}

// Calls body with the offset of every element, in row-major order.
template <typename Body>
void Buffer::for_each_offset(const Body& body) const {
  const std::int64_t count = size();
  Shape index(shape_.size());
  std::int64_t offset = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    body(offset);
    for (std::size_t dim = shape_.size(); dim-- > 0;) {
      offset += strides_[dim];
      if (++index[dim] < shape_[dim]) break;
      offset -= shape_[dim] * strides_[dim];
      index[dim] = 0;
    }
  }
}

// Calls body with the offset and length, in bytes, of every run of elements that are adjacent in memory.
template <typename Body>
void Buffer::for_each_run(const Body& body) const {
  const auto width = static_cast<std::int64_t>(size_of(dtype_));
  std::int64_t first = 0;
  std::int64_t length = 0;
  for_each_offset([&](std::int64_t offset) {
    if (length > 0 && offset * width == first + length) {
      length += width;
      return;
    }
    if (length > 0) body(first, length);
    first = offset * width;
    length = width;
  });
  if (length > 0) body(first, length);
}

std::vector<double> Buffer::values() const {
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(size()));
  for_each_offset([&](std::int64_t offset) { values.push_back(load(offset)); });
  return values;
}

void Buffer::set_values(std::span<const double> values) {
  std::size_t n = 0;
  for_each_offset([&](std::int64_t offset) { store(offset, values[n++]); });
}

void Buffer::fill(double value) {
  for_each_offset([&](std::int64_t offset) { store(offset, value); });
}

void Buffer::fill_random(Random& rng, double scale) {
  const bool boolean = dtype_ == DType::boolean;
  for_each_offset(
      [&](std::int64_t offset) { store(offset, boolean ? rng.noise() < 0.5 : scale * rng.normal()); });
}

void Buffer::poison() {
  for_each_run([&](std::int64_t offset, std::int64_t length) {
    std::memset(data_ + offset, static_cast<int>(poison_pattern), static_cast<std::size_t>(length));
  });
}

bool Buffer::all_written() const {
  const auto width = static_cast<std::int64_t>(size_of(dtype_));
  bool written = true;
  for_each_offset([&](std::int64_t offset) {
    const std::byte* element = data_ + offset * width;
    written =
        written && !std::all_of(element, element + width, [](std::byte b) { return b == poison_pattern; });
  });
  return written;
}

bool Buffer::guards_intact() const {
  if (!given()) return true;
  std::byte damage{0};
  for (std::size_t n = 0; n < storage_->bytes; ++n) {
    damage |= (storage_->data[n] ^ guard_pattern[n % 2]) & ~storage_->taken[n];
  }
  return damage == std::byte{0};
}

std::vector<std::byte> Buffer::bytes() const {
  std::vector<std::byte> bytes;
  bytes.reserve(bytes_of(size(), dtype_));
  for_each_run([&](std::int64_t offset, std::int64_t length) {
    bytes.insert(bytes.end(), data_ + offset, data_ + offset + length);
  });
  return bytes;
}

void with_workspace(std::size_t bytes, const std::function<void(Workspace)>& body) {
  // One byte past an aligned address, so that a kernel that aligns its memory needs every byte it asked for.
  constexpr std::size_t lead = guard_bytes + 1;
  const AlignedBytes memory = allocate(lead + bytes + guard_bytes);
  std::byte* const data = memory.get() + lead;
  const auto intact = [](std::byte guard) { return guard == guard_pattern[1]; };
  std::fill_n(memory.get(), lead, guard_pattern[1]);
  std::fill_n(data, bytes, poison_pattern);
  std::fill_n(data + bytes, guard_bytes, guard_pattern[1]);
  body({data, bytes});
  if (!std::all_of(memory.get(), data, intact)) throw GuardError("written before the workspace");
  if (!std::all_of(data + bytes, data + bytes + guard_bytes, intact)) {
    throw GuardError("written past the workspace");
  }
}

Buffer seed_words(const Dropout& dropout) {
  Buffer words(DType::i64, {2});
  auto* data = static_cast<std::uint64_t*>(words.view().data);
  data[0] = dropout.seed;
  data[1] = dropout.offset;
  return words;
}

void run_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                 const AttentionOutputs& outputs, Context context) {
  with_workspace(attention_forward_workspace(inputs, options, outputs, context), [&](Workspace workspace) {
    context.workspace = workspace;
    attention_forward(inputs, options, outputs, context);
  });
}

void run_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                  const AttentionGradients& gradients, Context context) {
  with_workspace(attention_backward_workspace(inputs, options, gradients, context), [&](Workspace workspace) {
    context.workspace = workspace;
    attention_backward(inputs, options, gradients, context);
  });
}

}  // namespace tilewise::test
