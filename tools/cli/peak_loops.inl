// SPDX-License-Identifier: Apache-2.0
// The body of a peak loop, included inside the anonymous namespace of each vector file after its
// two step() functions.

/// Independent sums: enough to hide the latency of an addition, and with the operands they fit 16
/// registers. They are named because an array would live in memory.
constexpr int kChains = 12;

template <typename V>
[[gnu::always_inline]] inline void run_chains(int64_t rounds, V a, V b, V (&sums)[kChains]) {
  V s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3], s4 = sums[4], s5 = sums[5];
  V s6 = sums[6], s7 = sums[7], s8 = sums[8], s9 = sums[9], s10 = sums[10], s11 = sums[11];
  for (int64_t r = 0; r < rounds; ++r) {
    step(s0, a, b), step(s1, a, b), step(s2, a, b), step(s3, a, b), step(s4, a, b), step(s5, a, b);
    step(s6, a, b), step(s7, a, b), step(s8, a, b), step(s9, a, b), step(s10, a, b),
        step(s11, a, b);
  }
  sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3, sums[4] = s4, sums[5] = s5;
  sums[6] = s6, sums[7] = s7, sums[8] = s8, sums[9] = s9, sums[10] = s10, sums[11] = s11;
}

/// A number that depends on every sum.
template <typename T, typename V>
T fold(const V (&sums)[kChains]) {
  T total = 0;
  for (const V& sum : sums) {
    T parts[sizeof(V) / sizeof(T)];
    __builtin_memcpy(parts, &sum, sizeof(V));
    for (T x : parts) total = total + x;
  }
  return total;
}
