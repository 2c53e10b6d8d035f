// SPDX-License-Identifier: Apache-2.0
// Register-only loops for AVX-512 VNNI. Compiled with the flags of that instruction set; called
// only where the CPU has it.
#include <immintrin.h>

#include "peak_loops.h"

namespace sagebwd::cli {
namespace {

/// Hides a value's origin from the optimiser, which would otherwise fold the loop.
template <typename V>
[[gnu::always_inline]] inline void opaque(V& value) {
  __asm__ volatile("" : "+v"(value));
}

[[gnu::always_inline]] inline void step(__m512i& sum, __m512i a, __m512i b) {
  sum = _mm512_dpbusd_epi32(sum, a, b);
  opaque(sum);
}

[[gnu::always_inline]] inline void step(__m512& sum, __m512 a, __m512 b) {
  sum = _mm512_fmadd_ps(a, b, sum);
  opaque(sum);
}

#include "peak_loops.inl"

bool available() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni");
}

unsigned int8_loop(int64_t rounds) {
  __m512i sums[kChains] = {};
  run_chains(rounds, _mm512_set1_epi8(3), _mm512_set1_epi8(-5), sums);
  return fold<unsigned>(sums);
}

float fp32_loop(int64_t rounds) {
  __m512 sums[kChains] = {};
  run_chains(rounds, _mm512_set1_ps(1.5f), _mm512_set1_ps(-0.5f), sums);
  return fold<float>(sums);
}

}  // namespace

const PeakLoops kAvx512VnniLoops{"avx512-vnni", "vpdpbusd", available, kChains * 64,
                                 kChains * 16,  int8_loop,  fp32_loop};

}  // namespace sagebwd::cli
