// SPDX-License-Identifier: Apache-2.0
#include "base/hash.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>

namespace sagebwd {
namespace {

TEST(Hash, EveryWordAndItsPlaceMatter) {
  const std::set<uint64_t> all = {hash64({1, 2, 3}), hash64({1, 3, 2}), hash64({2, 1, 3}),
                                  hash64({1, 2}),    hash64({1, 2, 0}), hash64({0, 1, 2}),
                                  hash64({1, 2, 4}), hash64({}),        hash64({0})};
  EXPECT_EQ(all.size(), 9u);
}

/// One flipped input bit flips about half of the output bits.
TEST(Hash, FlippedBitsSpread) {
  for (int word = 0; word < 3; ++word)
    for (int bit = 0; bit < 64; ++bit) {
      uint64_t w[3] = {11, 22, 33};
      const uint64_t before = hash64({w[0], w[1], w[2]});
      w[word] ^= uint64_t{1} << bit;
      const int flipped = std::popcount(before ^ hash64({w[0], w[1], w[2]}));
      EXPECT_GE(flipped, 14) << word << " " << bit;
      EXPECT_LE(flipped, 50) << word << " " << bit;
    }
}

TEST(Hash, UnitFloatsAreUniform) {
  constexpr int kCount = 100000, kBins = 20;
  int bins[kBins] = {};
  double sum = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    const float u = unit_float(hash64({5, i}));
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    ++bins[static_cast<int>(u * kBins)];
    sum += static_cast<double>(u);
  }
  EXPECT_NEAR(sum / kCount, 0.5, 5 * 0.2887 / std::sqrt(double{kCount}));
  const double expected = double{kCount} / kBins;
  for (int n : bins) EXPECT_NEAR(n, expected, 5 * std::sqrt(expected));
  EXPECT_LT(unit_float(~uint64_t{0}), 1.0f);
  EXPECT_EQ(unit_float(0), 0.0f);
}

/// Dither is replayable across versions and machines: these bits may not change.
TEST(Hash, ValuesAreFixed) {
  EXPECT_EQ(mix64(0), 0xe220a8397b1dcdafull);  // first output of SplitMix64 with seed 0
  static_assert(hash64({1, 2}) == mix64(mix64(0 ^ mix64(1)) ^ mix64(2)));
}

}  // namespace
}  // namespace sagebwd
