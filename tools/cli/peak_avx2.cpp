// SPDX-License-Identifier: Apache-2.0
// Register-only loops for AVX2. Compiled with the flags of that instruction set; called only where
// the CPU has it.
#include <immintrin.h>

#include "peak_loops.h"

namespace sagebwd::cli {
namespace {

/// Hides a value's origin from the optimiser, which would otherwise move the products out of the
/// loop.
template <typename V>
[[gnu::always_inline]] inline void opaque(V& value) {
  __asm__ volatile("" : "+x"(value));
}

[[gnu::always_inline]] inline void step(__m256i& sum, __m256i a, __m256i& b) {
  opaque(b);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
  opaque(sum);
}

[[gnu::always_inline]] inline void step(__m256& sum, __m256 a, __m256 b) {
  sum = _mm256_fmadd_ps(a, b, sum);
  opaque(sum);
}

#include "peak_loops.inl"

bool available() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

unsigned int8_loop(int64_t rounds) {
  __m256i sums[kChains] = {};
  run_chains(rounds, _mm256_set1_epi8(3), _mm256_set1_epi8(-5), sums);
  return fold<unsigned>(sums);
}

float fp32_loop(int64_t rounds) {
  __m256 sums[kChains] = {};
  run_chains(rounds, _mm256_set1_ps(1.5f), _mm256_set1_ps(-0.5f), sums);
  return fold<float>(sums);
}

}  // namespace

const PeakLoops kAvx2Loops{
    "avx2",   "vpmaddubsw + vpmaddwd + vpaddd", available, kChains * 32, kChains * 8, int8_loop,
    fp32_loop};

}  // namespace sagebwd::cli
