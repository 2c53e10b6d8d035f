// SPDX-License-Identifier: Apache-2.0
// Whether strided regions share a byte, against marking every byte.
// tests/cpp/api/bad_input_test.cpp has the refusals.
#include "spec/overlap.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace sagebwd::spec {
namespace {

std::set<uintptr_t> bytes_of(const Region& r) {
  std::set<uintptr_t> bytes;
  for (int64_t i = 0; i < r.count[0]; ++i)
    for (int64_t j = 0; j < r.count[1]; ++j)
      for (int64_t k = 0; k < r.count[2]; ++k)
        for (int64_t c = 0; c < r.row; ++c)
          bytes.insert(r.begin +
                       static_cast<uintptr_t>(i * r.step[0] + j * r.step[1] + k * r.step[2] + c));
  return bytes;
}

TEST(Overlap, AgreesWithMarkingEveryByte) {
  std::mt19937 random(7);
  const auto below = [&](int n) {
    return static_cast<int64_t>(random() % static_cast<unsigned>(n));
  };
  int shared = 0, interleaved = 0;
  for (int repeat = 0; repeat < 4000; ++repeat) {
    // Layouts a caller would have, or any strides at all.
    const auto draw = [&] {
      Region r{"", static_cast<uintptr_t>(1000 + below(120)), 1 + below(6), {}, {}};
      for (int64_t& n : r.count) n = 1 + below(4);
      if (repeat % 2 == 0) {
        int64_t step = r.row + below(12);
        for (size_t i : {2u, 1u, 0u}) r.step[i] = step, step *= r.count[i] + below(2);
      } else {
        for (int64_t& s : r.step) s = below(50);
      }
      return r;
    };
    const Region a = draw(), b = draw();
    const std::set<uintptr_t> in_a = bytes_of(a), in_b = bytes_of(b);
    bool want = false;
    for (uintptr_t x : in_a) want = want || in_b.contains(x);
    const auto show = [](const Region& r) {
      return ::testing::PrintToString(std::tuple(r.begin, r.row, r.count, r.step));
    };
    ASSERT_EQ(overlap(a, b), want) << show(a) << " and " << show(b);
    ASSERT_EQ(overlap(b, a), want) << show(a) << " and " << show(b);
    shared += want;
    interleaved += !want && *in_a.begin() < *in_b.rbegin() && *in_b.begin() < *in_a.rbegin();
  }
  EXPECT_GT(shared, 500);
  EXPECT_GT(interleaved, 300) << "the search itself was hardly asked";
}

TEST(Overlap, EmptyRegionsShareNothing) {
  const Region a{"", 1000, 16, {2, 2, 2}, {400, 100, 20}};
  EXPECT_TRUE(overlap(a, a));
  for (size_t i = 0; i < 3; ++i) {
    Region none = a;
    none.count[i] = 0;
    EXPECT_FALSE(overlap(a, none));
    EXPECT_FALSE(overlap(none, a));
  }
  Region none = a;
  none.row = 0;
  EXPECT_FALSE(overlap(a, none));
}

/// Sizes of real tensors, and addresses at the end of the address space.
TEST(Overlap, LargeTensors) {
  constexpr int64_t kTokens = int64_t{1} << 20, kHeads = 32, kRow = 128 * 2;
  const uintptr_t base = uintptr_t{0} - (uintptr_t{1} << 40);
  // [b, s, 3, h, d]: q, k and v of one packed buffer
  const auto part = [&](int64_t index) {
    return Region{"",
                  base + static_cast<uintptr_t>(index * kHeads * kRow),
                  kRow,
                  {8, kHeads, kTokens},
                  {kTokens * 3 * kHeads * kRow, kRow, 3 * kHeads * kRow}};
  };
  EXPECT_FALSE(overlap(part(0), part(1)));
  EXPECT_FALSE(overlap(part(2), part(0)));
  EXPECT_TRUE(overlap(part(1), part(1)));
  Region shifted = part(1);
  shifted.begin -= 1;
  EXPECT_TRUE(overlap(part(0), shifted));
  EXPECT_FALSE(overlap(part(2), shifted));
  // A line of bytes in the gap between two heads, and one byte longer.
  const Region gappy{"", base, 64, {4, 4, 1000}, {1 << 20, 1 << 18, 64}};
  Region line{"", base + 64000, (1 << 18) - 64000, {1, 1, 1}, {}};
  EXPECT_FALSE(overlap(gappy, line));
  line.row += 1;
  EXPECT_TRUE(overlap(gappy, line));
}

}  // namespace
}  // namespace sagebwd::spec
