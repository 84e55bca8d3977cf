#include "cuda/norm/common/config.h"
#include "cuda/norm/common/dispatch.cuh"
#include "cuda/norm/simt/backward_late.cuh"
#include "cuda/norm/simt/backward_rows.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/column_sums.h"

namespace tilewise::cuda::norm {
namespace {

// With n = (x − mean)·rstd and g = dy·weight: dx = rstd·(g − mean(g) − n·mean(g·n)), without mean(g) in an
// rms norm. The gradients of weight and bias, Σ dy·n and Σ dy over rows, are summed by each block over its
// rows, and then over blocks.

// What rows ahead take.
std::size_t stages_bytes(const RowShape& shape, int stages) {
  return static_cast<std::size_t>(stages) * 2 * 16 * static_cast<std::size_t>(shape.chunks * shape.threads);
}

RowShape late_shape(int count) {
  const int threads = ((count + late_chunks - 1) / late_chunks + 31) / 32 * 32;
  return {.in_chunks = true, .late = true, .chunks = late_chunks, .threads = threads};
}

// Whether late_kernel is for rows of so many chunks. On an H200 it takes 0.85 to 0.99 of chunks_kernel's time
// for rows of an rms norm of 768 to 8192 elements of bf16; layer norms gain more. f16 was not measured.
bool joins_late(const NormCall& call, int count, const DeviceProperties& device) {
  return size_of(call.problem.dtype) == 2 && count >= 96 && count <= late_chunks * late_threads &&
         stages_bytes(late_shape(count), late_stages) <= device.shared_bytes;
}

// Where one row of x and dy is more than shared memory has, elements are taken one by one.
RowShape backward_shape(const NormCall& call, const DeviceProperties& device) {
  RowShape shape = shape_of(call);
  if (!shape.in_chunks) return shape;
  const auto size = 16 / static_cast<int>(size_of(call.problem.dtype));
  const auto count = static_cast<int>(call.problem.dim) / size, held = columns_held / size;
  if (joins_late(call, count, device)) return late_shape(count);
  shape.one_warp = count <= 32 * held;
  shape.chunks = held;
  if (shape.one_warp) {
    if (count <= 32) shape.chunks = 1;
    shape.threads = 256;
    shape.rows = 8;
  } else {
    while (count > shape.chunks * resident_threads) shape.chunks *= 2;
    shape.threads = ((count + shape.chunks - 1) / shape.chunks + 31) / 32 * 32;
    shape.rows = 1;
  }
  return stages_bytes(shape, 1) <= device.shared_bytes ? shape : RowShape{};
}

// What shapes there are.
template <typename T, typename Body>
void with_backward_shape(const RowShape& shape, const Body& body) {
  constexpr int held = columns_held / chunk_size<T>;
  if (shape.one_warp) {
    return shape.chunks == 1 ? body.template operator()<1, true>() : body.template operator()<held, true>();
  }
  if (shape.chunks == held) return body.template operator()<held, false>();
  shape.chunks == 2 ? body.template operator()<2, false>() : body.template operator()<4, false>();
}

// How many pieces rows are summed in: blocks that stay, or strips.
int pieces_of(const NormCall& call, const RowShape& shape, int multiprocessors) {
  const NormProblem& problem = call.problem;
  if (!shape.in_chunks) return row_strips(problem.rows, problem.dim, multiprocessors);
  const int blocks_each = (shape.late ? late_threads : resident_threads) / shape.threads;
  return blocks_that_stay((problem.rows + shape.rows - 1) / shape.rows, multiprocessors, blocks_each);
}

}  // namespace

std::size_t backward_workspace(const NormCall& call, const Context& context) {
  Arena arena(nullptr);
  const DeviceProperties& device = device_properties(context.device.index);
  take_partials(arena, call, pieces_of(call, backward_shape(call, device), device.multiprocessors));
  return arena.used();
}

void backward(const NormCall& call, const Context& context) {
  const NormProblem& problem = call.problem;
  const DeviceProperties& device = device_properties(context.device.index);
  const RowShape shape = backward_shape(call, device);
  const int pieces = pieces_of(call, shape, device.multiprocessors);
  Arena arena(context.workspace.data);
  const Partials partials = take_partials(arena, call, pieces);
  const bool sums = call.d_weight.data != nullptr || call.d_bias.data != nullptr;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  with_types(problem, [&]<typename T, Norm norm>() {
    if (shape.in_chunks) {
      Launch how{
          .name = "tilewise norm backward", .blocks = pieces, .threads = shape.threads, .stream = stream};
      if constexpr (sizeof(T) == 2) {
        if (shape.late) {
          how.shared_bytes = asked_for(stages_bytes(shape, late_stages));
          return launch<late_kernel<T, norm>>(how, call, partials);
        }
      }
      return with_backward_shape<T>(shape, [&]<int chunks, bool one_warp>() {
        const auto run = [&]<int stages>() {
          how.shared_bytes = asked_for(stages_bytes(shape, stages));
          launch<chunks_kernel<T, norm, chunks, one_warp, stages>>(how, call, partials);
        };
        stages_bytes(shape, 3) <= device.shared_bytes ? run.template operator()<3>()
                                                      : run.template operator()<1>();
      });
    }
    // Sums come first: dx may stand where dy does.
    const std::int64_t column_blocks = (problem.dim + 255) / 256;
    if (sums) {
      launch<columns_kernel<T, norm>>({.name = "tilewise norm backward, weights",
                                       .blocks = column_blocks * pieces,
                                       .threads = 256,
                                       .stream = stream},
                                      call, partials, pieces, static_cast<int>(column_blocks));
    }
    if (call.dx.data != nullptr) {
      launch<elements_kernel<T, norm>>(
          {.name = "tilewise norm backward", .blocks = problem.rows, .threads = 256, .stream = stream}, call);
    }
  });
  sum_partials({partials.weight, call.d_weight}, {partials.bias, call.d_bias}, pieces, problem.dim, context);
}

}  // namespace tilewise::cuda::norm
