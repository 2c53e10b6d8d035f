// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers: a value is a pure function of its key, so it can be replayed
// anywhere.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace sagebwd {

/// The finaliser of SplitMix64: every input bit reaches every output bit.
constexpr uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr uint64_t hash64(std::initializer_list<uint64_t> words) {
  uint64_t h = 0;
  for (uint64_t w : words) h = mix64(h ^ mix64(w));
  return h;
}

/// Uniform in [0, 1) with 24 bits, exact in FP32.
constexpr float unit_float(uint64_t h) { return static_cast<float>(h >> 40) * 0x1p-24f; }

}  // namespace sagebwd
