// SPDX-License-Identifier: Apache-2.0
// A thread block sorts a row in shared memory. All compare the same pairs (a bitonic network), so
// the time does not depend on the scores.
#include "cuda/host/launch.h"
#include "cuda/mix/jobs.h"

namespace sagebwd::cuda::mix {
namespace {

constexpr int kThreads = 256;
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
  for (int run = 2; run <= size; run *= 2)
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int pair = thread; pair < size / 2; pair += kThreads) {
        const int in = pair & (step - 1), low = 2 * (pair - in) + in, high = low + step;
        const uint64_t a = keys[low], b = keys[high];
        const bool rising = (low & run) == 0;
        if ((a > b) == rising) keys[low] = b, keys[high] = a;
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

}  // namespace sagebwd::cuda::mix
