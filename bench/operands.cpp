#include "operands.h"

#include <cstring>
#include <new>

namespace tilewise::bench {
namespace {

std::size_t bytes_of(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.size()) * size_of(tensor.dtype);
}

std::uint64_t next_word(std::uint64_t& state) {  // splitmix64
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t word = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

// The scaled sum of four uniform 16-bit numbers: an approximate normal distribution with mean 0 and
// variance 1.
float next_normal(std::uint64_t& state) {
  const std::uint64_t word = next_word(state);
  const std::uint64_t sum =
      (word & 0xffff) + ((word >> 16) & 0xffff) + ((word >> 32) & 0xffff) + (word >> 48);
  return (static_cast<float>(sum) * 0x1p-16f - 2.0f) * 1.7320508f;
}

void store(const Tensor& tensor, std::int64_t index, float value) {
  switch (tensor.dtype) {
    case DType::f16: static_cast<f16*>(tensor.data)[index] = f16(value); break;
    case DType::bf16: static_cast<bf16*>(tensor.data)[index] = bf16(value); break;
    default: static_cast<float*>(tensor.data)[index] = value;
  }
}

}  // namespace

double load(const Tensor& tensor, std::int64_t index) {
  switch (tensor.dtype) {
    case DType::f16:
      return static_cast<double>(static_cast<float>(static_cast<const f16*>(tensor.data)[index]));
    case DType::bf16:
      return static_cast<double>(static_cast<float>(static_cast<const bf16*>(tensor.data)[index]));
    default: return static_cast<double>(static_cast<const float*>(tensor.data)[index]);
  }
}

Operands::Operands(const Problem& problem) {
  const Shape& s = problem.shape;
  inputs.q = random(problem.dtype, {s.b, s.hq, s.sq, s.d});
  inputs.k = random(problem.dtype, {s.b, s.hkv, s.sk, s.d});
  inputs.v = random(problem.dtype, {s.b, s.hkv, s.sk, s.dv});
  outputs.o = empty(problem.dtype, {s.b, s.hq, s.sq, s.dv});
  outputs.lse = empty(DType::f32, {s.b, s.hq, s.sq});
  if (problem.pass == Pass::backward) {
    gradients.o = outputs.o;
    gradients.lse = outputs.lse;
    gradients.d_o = random(problem.dtype, {s.b, s.hq, s.sq, s.dv});
    gradients.dq = empty(problem.dtype, {s.b, s.hq, s.sq, s.d});
    gradients.dk = empty(problem.dtype, {s.b, s.hkv, s.sk, s.d});
    gradients.dv = empty(problem.dtype, {s.b, s.hkv, s.sk, s.dv});
  }
  options.causal = problem.causal;
  options.alignment = problem.alignment();
  options.window = {problem.features.window, problem.features.window};
  options.deterministic = problem.features.deterministic;
  options.dropout = {.probability = static_cast<float>(problem.features.dropout), .seed = 42};
  make_mask(problem);
  if (problem.features.blocks < 1) make_blocks(problem);
}

void Operands::make_mask(const Problem& problem) {
  const Shape& s = problem.shape;
  if (problem.features.mask == MaskKind::additive) inputs.mask = random(problem.dtype, {s.sq, s.sk});
  if (problem.features.mask == MaskKind::boolean) {
    inputs.mask = empty(DType::boolean, {s.b, 1, 1, s.sk});
    bool* visible = static_cast<bool*>(inputs.mask.data);
    for (std::int64_t n = 0; n < inputs.mask.size(); ++n) visible[n] = n % s.sk < problem.unpadded();
  }
}

void Operands::make_blocks(const Problem& problem) {
  const std::int64_t rows = (problem.shape.sq + block_size - 1) / block_size;
  const std::int64_t columns = (problem.shape.sk + block_size - 1) / block_size;
  inputs.blocks.block_q = inputs.blocks.block_k = block_size;
  inputs.blocks.counts = empty(DType::i32, {1, 1, rows});
  inputs.blocks.indices = empty(DType::i32, {1, 1, rows, columns});
  auto* counts = static_cast<std::int32_t*>(inputs.blocks.counts.data);
  auto* indices = static_cast<std::int32_t*>(inputs.blocks.indices.data);
  for (std::int64_t row = 0; row < rows; ++row) {
    counts[row] = 0;
    for (std::int64_t column = 0; column < columns; ++column) {
      if (!problem.keeps_block(row, column)) continue;
      indices[row * columns + counts[row]++] = static_cast<std::int32_t>(column);
    }
  }
}

void* Operands::allocate(std::size_t bytes) {
  constexpr std::size_t alignment = 64;
  void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (data == nullptr) throw std::bad_alloc();
  return buffers_.emplace_back(data).get();
}

Tensor Operands::empty(DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor tensor(nullptr, dtype, std::span<const std::int64_t>(shape.begin(), shape.size()));
  tensor.data = allocate(bytes_of(tensor));
  std::memset(tensor.data, 0, bytes_of(tensor));  // allocates the pages before anything is timed
  return tensor;
}

Tensor Operands::random(DType dtype, std::initializer_list<std::int64_t> shape) {
  const Tensor tensor = empty(dtype, shape);
  for (std::int64_t n = 0; n < tensor.size(); ++n) store(tensor, n, next_normal(random_state_));
  return tensor;
}

std::vector<Tensor> Operands::results(Pass pass) const {
  if (pass == Pass::forward) return {outputs.o, outputs.lse};
  return {gradients.dq, gradients.dk, gradients.dv};
}

void Operands::spoil_results(Pass pass) {
  for (const Tensor& tensor : results(pass)) std::memset(tensor.data, 0xff, bytes_of(tensor));
}

std::size_t Operands::result_bytes(Pass pass) const {
  std::size_t bytes = 0;
  for (const Tensor& tensor : results(pass)) bytes += bytes_of(tensor);
  return bytes;
}

}  // namespace tilewise::bench
