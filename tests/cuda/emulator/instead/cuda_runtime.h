// SPDX-License-Identifier: Apache-2.0
// The CUDA language as C++: its keywords, built-in variables and functions.
//
// A thread block runs on one thread of the system, so its shared memory is `thread_local`, which
// C++ allows in front of `extern` arrays and of variables inside functions alike.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda_runtime_api.h"
#include "emulator/block.h"

// Kernels that all targets share are compiled once, and may not ask for the target.
#ifndef __CUDA_ARCH__
#pragma GCC poison __CUDA_ARCH__
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#ifndef __clang__
#define __builtin_assume(condition)
#endif

#define threadIdx (::sagebwd::emulator::thread->index)
#define blockIdx (::sagebwd::emulator::block->index)
#define blockDim (::sagebwd::emulator::block->size)
#define gridDim (::sagebwd::emulator::block->grid)

using std::isnan;
using std::max;
using std::min;

// Bits and rounding.
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }  // the build forbids contraction
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
/// a·b + c rounded down.
inline float __fmaf_rd(float a, float b, float c) {
  const double exact = static_cast<double>(a) * b + c;
  const float near = static_cast<float>(exact);
  return near > exact ? std::nextafter(near, -INFINITY) : near;
}
inline float __fadd_rd(float a, float b) {  // of numbers whose sum is exact in FP64
  const double sum = static_cast<double>(a) + static_cast<double>(b);
  const float near = static_cast<float>(sum);
  return static_cast<double>(near) > sum ? std::nextafter(near, -INFINITY) : near;
}
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  if (std::fabs(x) >= 0x1p31f) return x > 0 ? INT32_MAX : INT32_MIN;
  return static_cast<int>(std::nearbyint(x));
}
inline int __float2int_rz(float x) { return __float2int_rn(std::trunc(x)); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __vimax3_s32(int a, int b, int c) { return max(a, max(b, c)); }
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return sum;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  unsigned out = 0;
  for (unsigned i = 0; i < 4; ++i)
    out |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return out;
}

// Barriers.
inline void __syncthreads() { sagebwd::emulator::block->barrier(0, 0); }
inline int __syncthreads_or(int x) { return sagebwd::emulator::block->barrier(0, 0, x != 0); }
inline void __syncwarp() {
  struct Nothing {
  } nothing;
  sagebwd::emulator::meet<Nothing>(nothing, [](sagebwd::emulator::Lanes<Nothing>) {});
}

// Lanes of a warp that meet. Kernels name all of them in the mask.
namespace sagebwd::emulator {

template <typename T>
struct Shuffle {
  T value;
  unsigned from;
  T result;
};
template <typename T>
T shuffle(T x, unsigned from) {
  Shuffle<T> mine{x, from % kLanes, {}};
  meet<Shuffle<T>>(mine, [](Lanes<Shuffle<T>> all) {
    for (unsigned lane = 0; lane < kLanes; ++lane) all[lane].result = all[all[lane].from].value;
  });
  return mine.result;
}

struct Reduction {
  unsigned value, result;
};

}  // namespace sagebwd::emulator

/// From a lane of the same `width` neighbours.
template <typename T>
T __shfl_sync(unsigned, T x, int lane, unsigned width = sagebwd::emulator::kLanes) {
  const unsigned first = sagebwd::emulator::thread->lane / width * width;
  return sagebwd::emulator::shuffle(x, first + static_cast<unsigned>(lane) % width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return sagebwd::emulator::shuffle(x,
                                    sagebwd::emulator::thread->lane ^ static_cast<unsigned>(mask));
}
template <typename T>
T __shfl_up_sync(unsigned, T x, unsigned step) {
  const unsigned lane = sagebwd::emulator::thread->lane;
  return sagebwd::emulator::shuffle(x, lane >= step ? lane - step : lane);
}
inline unsigned __ballot_sync(unsigned, int vote) {
  using namespace sagebwd::emulator;
  Reduction mine{vote != 0, 0};
  meet<Reduction>(mine, [](Lanes<Reduction> all) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < kLanes; ++lane) votes |= all[lane].value << lane;
    for (unsigned lane = 0; lane < kLanes; ++lane) all[lane].result = votes;
  });
  return mine.result;
}
inline unsigned __match_any_sync(unsigned, int x) {
  using namespace sagebwd::emulator;
  Reduction mine{static_cast<unsigned>(x), 0};
  meet<Reduction>(mine, [](Lanes<Reduction> all) {
    for (unsigned lane = 0; lane < kLanes; ++lane)
      for (unsigned other = 0; other < kLanes; ++other)
        all[lane].result |= unsigned{all[lane].value == all[other].value} << other;
  });
  return mine.result;
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == ~0u; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  using namespace sagebwd::emulator;
  Reduction mine{x, 0};
  meet<Reduction>(mine, [](Lanes<Reduction> all) {
    unsigned most = 0;
    for (unsigned lane = 0; lane < kLanes; ++lane) most = max(most, all[lane].value);
    for (unsigned lane = 0; lane < kLanes; ++lane) all[lane].result = most;
  });
  return mine.result;
}

// Memory that other blocks see.
template <typename T>
T atomicAdd(T* at, T x) {
  return std::atomic_ref<T>(*at).fetch_add(x);
}
template <typename T>
T atomicOr(T* at, T x) {
  return std::atomic_ref<T>(*at).fetch_or(x);
}
template <typename T>
T atomicMax(T* at, T x) {
  std::atomic_ref<T> here(*at);
  T old = here;
  while (old < x && !here.compare_exchange_weak(old, x)) {
  }
  return old;
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
template <typename T>
T __ldcs(const T* at) {
  return *at;
}
template <typename T>
void __stcs(T* at, T x) {
  *at = x;
}
/// Asks memory anew each time.
template <typename T>
T __ldcv(const T* at) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return *at;
}
/// Who spins lets others go first.
inline void __nanosleep(unsigned) { sagebwd::emulator::block->pause(); }
/// Time goes on wherever somebody looks at it.
inline long long clock64() {
  static thread_local long long now = 0;
  return now += 1000;
}
