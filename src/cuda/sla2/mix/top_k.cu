// SPDX-License-Identifier: Apache-2.0
// A thread block has a row in shared memory and sorts runs of it that are just long enough for k.
// Of two runs the better half goes on, until one run is left. All compare the same pairs (a bitonic
// network), so the time does not depend on the scores.
#include "cuda/host/launch.h"
#include "cuda/sla2/mix/jobs.h"

namespace sagebwd::cuda::sla2::mix {
namespace {

constexpr int kThreads = 128;
constexpr uint64_t kLast = ~uint64_t{0};

/// Smaller keys come first: those of larger scores, then those of earlier places.
__device__ __forceinline__ uint64_t key_of(float score, int place) {
  const uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~rising) << 32 | static_cast<uint32_t>(place);
}

/// At least `n`, and at least two.
__host__ __device__ __forceinline__ int power_of_two(int n) {
  int size = 2;
  while (size < n) size *= 2;
  return size;
}

}  // namespace

__global__ void __launch_bounds__(kThreads) top_k_kernel(const __grid_constant__ TopKJob p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int listed;
  uint64_t* const keys = reinterpret_cast<uint64_t*>(memory);
  const int thread = static_cast<int>(threadIdx.x), size = power_of_two(p.columns);
  const int64_t row = blockIdx.x;
  const float* const scores = p.scores + row * p.columns;
  if (thread == 0) listed = 0;
  for (int i = thread; i < size; i += kThreads)
    keys[i] = i < p.columns ? key_of(scores[i], i) : kLast;
  const auto order = [&](int low, int high, bool rising) {
    const uint64_t a = keys[low], b = keys[high];
    if ((a > b) == rising) keys[low] = b, keys[high] = a;
  };
  const int run = min(power_of_two(p.k), size), log_run = __ffs(run) - 1;
  for (int half = 1; half < run; half *= 2)
    for (int step = half; step > 0; step /= 2) {
      __syncthreads();
      for (int pair = thread; pair < size / 2; pair += kThreads) {
        const int in = pair & (step - 1), low = 2 * (pair - in) + in;
        order(low, low + step, (low & 2 * half) == 0);
      }
    }
  // Runs rise and fall in turns, so the better ones of equal places are the best of both: a run
  // that rises and falls, which one more merge sorts. They take the place of the first run.
  for (int gap = run; gap < size; gap *= 2) {
    const int left = size / (2 * gap) * run;  // numbers that go on
    __syncthreads();
    for (int i = thread; i < left; i += kThreads) {
      const int at = (i >> log_run) * 2 * gap + (i & (run - 1));
      keys[at] = min(keys[at], keys[at + gap]);
    }
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int pair = thread; pair < left / 2; pair += kThreads) {
        const int number = pair >> (log_run - 1), rest = pair & (run / 2 - 1),
                  in = rest & (step - 1);
        const int low = number * 2 * gap + 2 * (rest - in) + in;
        order(low, low + step, number % 2 == 0);
      }
    }
  }
  __syncthreads();
  int count = 0;
  for (int i = thread; i < p.k; i += kThreads) {
    const int place = static_cast<int>(keys[i] & 0xffffffffu);
    p.index[row * p.k + i] = place;
    count += static_cast<uint32_t>(keys[i] >> 32) != 0xff800000u;  // of -inf
  }
  if (count > 0) atomicAdd(&listed, count);
  __syncthreads();
  if (thread == 0) p.count[row] = listed;
}

void launch_top_k(const TopKJob& job, cudaStream_t stream) {
  launch(top_k_kernel, dim3(static_cast<unsigned>(job.rows)), kThreads,
         power_of_two(job.columns) * static_cast<int>(sizeof(uint64_t)), job, stream);
}

}  // namespace sagebwd::cuda::sla2::mix
