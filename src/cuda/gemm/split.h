#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::gemm {

// Products of f32 on tensor cores: factors are split into three parts of bf16, each what the ones before it
// leave, of eight bits. Six products of parts make f32's precision; three, of two parts, more than that of
// TF32.

/// The parts that are multiplied.
struct Term {
  int a = 0, b = 0;
};

/// Small ones come first: the sum loses less.
constexpr Term term_of(int terms, int index) {
  constexpr Term six[] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
  return six[index + 6 - terms];
}

constexpr int parts_of(int terms) { return terms == 3 ? 2 : 3; }

void run_split(const GemmCall& call, const Context& context);
std::size_t split_workspace(const GemmCall& call, const Context& context);

}  // namespace tilewise::cuda::gemm
