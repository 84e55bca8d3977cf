#include <omp.h>

#include "tilewise/context.h"

namespace tilewise {

ParallelFor openmp_parallel_for(int threads) {
  const int count = threads > 0 ? threads : omp_get_max_threads();
  return {.run =
              [count](std::int64_t n, const ParallelFor::Body& body) {
#pragma omp parallel for num_threads(count) schedule(dynamic, 1) if (n > 1 && count > 1)
                for (std::int64_t index = 0; index < n; ++index) body(index);
              },
          .threads = count};
}

ParallelFor serial_parallel_for() {
  return {.run =
              [](std::int64_t n, const ParallelFor::Body& body) {
                for (std::int64_t index = 0; index < n; ++index) body(index);
              },
          .threads = 1};
}

}  // namespace tilewise
