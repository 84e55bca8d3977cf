#pragma once

#include "cuda/attention/sm90/backward/consumer.cuh"
#include "cuda/attention/sm90/backward/producer.cuh"
#include "cuda/ptx/dependent.cuh"

namespace tilewise::cuda::wgmma_backward {

// A persistent CTA takes jobs, each with the keys of one CTA of the other kernels, until there are none. The
// producer's first warp takes them from a counter and writes their walks to shared memory, where the other
// roles read them: no role has registers for a walk. Rings and counts of tiles continue from job to job.

/// Calls body(walk, parity of the job's number) for each job, and then done(job_empty barrier).
template <Config c, typename Body, typename Done>
__device__ __forceinline__ void for_each_job(const TileParams& params, const Shared<c>& shared,
                                             const Body& body, const Done& done) {
  int n = 0;
#pragma unroll 1
  while (true) {
    const volatile Job& job = shared.jobs[n & 1];
    wait(shared.job_full + (n & 1), static_cast<std::uint32_t>(n >> 1 & 1));
    if (job.number < 0) return;
    body(shared.jobs[n & 1].walk, static_cast<std::uint32_t>(n & 1));
    n = job.number;  // read again, to take no register during the body
    done(shared.job_empty + (n & 1));
    ++n;
  }
}

/// Takes jobs, publishes them and loads their operands. Called by the producer's first warp.
template <Config c>
__device__ void load_jobs(const TileParams& params, const Shared<c>& shared) {
  static_assert(c.q_stages == c.d_o_stages);
  // For a deterministic dQ, all jobs are numbered by the counter in the order in which they start. Otherwise
  // the first job needs no counter.
  const bool counted = params.workspace.added != nullptr;
  Ring<c.q_stages> rows_at;
#pragma unroll 1
  for (int n = 0;; ++n) {
    Job& job = shared.jobs[n & 1];
    if (counted || n > 0) wait_for_previous_kernel();  // the previous kernel clears the ticket
    if (lane_now() == 0) {
      wait(shared.job_empty + (n & 1), static_cast<std::uint32_t>(n >> 1 & 1) ^ 1);
      std::uint32_t index = blockIdx.x;
      bool known = n == 0 && !counted;
      while (true) {
        if (!known) index = atomicAdd(params.workspace.ticket, 1u) + (counted ? 0 : gridDim.x);
        known = false;
        const bool exists = index < params.turns.heads * params.turns.tiles;
        job.number = exists ? n : -1;
        if (!exists) break;
        job.walk = Walk::of<c>(params.sizes, params.turns, index);
        if (!params.sizes.packed || job.walk.key_count > 0) break;  // otherwise no sequence owns the keys
      }
      arrive(shared.job_full + (n & 1));
    }
    __syncwarp();  // lane 0 has written the job, which all lanes read
    if (job.number < 0) return;
    wait(shared.keys_empty, static_cast<std::uint32_t>(n & 1) ^ 1);
    load_keys<c>(params, shared, job.walk);
    // The kernels before the previous one wrote Q, K, V and dO, and the previous one waited for them. It
    // writes the rows' values itself.
    wait_for_previous_kernel();
    if (lane_now() == 0) {
      Ring<c.q_stages> same = rows_at;
      load_queries<c>(params, shared, job.walk, rows_at, same);
    }
    __syncwarp();
  }
}

template <typename T, Config c>
__device__ __forceinline__ void consume_jobs(const TileParams& params, const Shared<c>& shared) {
  typename Consumer<T, c>::At at;
  int tiles = 0;
  const auto consume_job = [&](const Walk& walk, std::uint32_t parity) {
    Consumer<T, c> consumer(params, shared, walk);
    wait(shared.keys_full, parity);
    consumer.clear_sums();
    consumer.run_plain(at, tiles);
    pin(consumer.dk);
    pin(consumer.dv);
    consumer.arrive_once(shared.keys_empty);
    wait(shared.dq_empty + consumer.group, tiles % 2 ^ 1);  // dK and dV also pass through dQ's buffers
    consumer.store_gradients();
    sync_some<both_consumers,
              c.consumer_threads>();  // both have read dK and dV, which the next job overwrites
  };
  for_each_job<c>(params, shared, consume_job, [&](Mbarrier* done) {
    __syncwarp();
    if (lane_now() == 0) arrive(done);
  });
}

template <typename T, Config c>
__device__ __forceinline__ void run_jobs(const TileParams& params, const Shared<c>& shared) {
  if (threadIdx.x < c.consumer_threads) {
    take_registers<c.consumer_registers()>();
    consume_jobs<T, c>(params, shared);
    return;
  }
  keep_registers<c.producer_registers>();
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32) - c.consumer_warps;
  if (warp == 0) return load_jobs<c>(params, shared);
  if (warp > 2 || lane_now() != 0) return;
  wait_for_previous_kernel();  // the previous kernel clears the sums
  std::uint32_t parity = 0;
  for_each_job<c>(
      params, shared,
      [&](const Walk& walk, std::uint32_t) { add_dq_sums<c>(params, shared, walk, warp - 1, parity); },
      [](Mbarrier* done) { arrive(done); });
}

}  // namespace tilewise::cuda::wgmma_backward
