// SPDX-License-Identifier: Apache-2.0
// What a validated problem says: sizes, defaults, and which keys a query sees.
// tests/cpp/api/bad_input_test.cpp has the refusals.
#include "spec/problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "sagebwd/version.h"

namespace sagebwd::spec {
namespace {

ForwardArgs forward_of(int64_t b, int64_t h, int64_t hk, int64_t nq, int64_t nk, int64_t d) {
  ForwardArgs a;
  a.q = a.o = contiguous(nullptr, Dtype::bf16, {b, h, nq, d});
  a.k = a.v = contiguous(nullptr, Dtype::bf16, {b, hk, nk, d});
  a.lse = contiguous_stats(nullptr, h, nq);
  return a;
}

TEST(Problem, SizesAndDefaults) {
  const Problem p = resolve(forward_of(2, 6, 3, 10, 20, 64), false);
  EXPECT_EQ(p.direction, Direction::forward);
  EXPECT_EQ(p.device, Device::cpu);
  EXPECT_EQ(p.dtype, Dtype::bf16);
  EXPECT_EQ(p.b, 2);
  EXPECT_EQ(p.h, 6);
  EXPECT_EQ(p.hk, 3);
  EXPECT_EQ(p.nq, 10);
  EXPECT_EQ(p.nk, 20);
  EXPECT_EQ(p.d, 64);
  EXPECT_EQ(p.group(), 2);
  EXPECT_EQ(p.scale, 0.125f);
  EXPECT_EQ(p.left, -1);
  EXPECT_EQ(p.right, -1);
  EXPECT_FALSE(p.packed());
  EXPECT_FALSE(p.has_dlse);
  EXPECT_EQ(p.num_sequences(), 2);
  EXPECT_EQ(p.sequence(1).batch, 1);
  EXPECT_EQ(p.sequence(1).q_begin, 0);
  EXPECT_EQ(p.sequence(1).nk, 20);
}

TEST(Problem, ScaleIsTakenAsGiven) {
  ForwardArgs a = forward_of(1, 1, 1, 4, 4, 8);
  for (const float scale : {1.0f, -0.5f, 1e-3f}) {
    a.scale = scale;
    EXPECT_EQ(resolve(a, false).scale, scale);
  }
}

TEST(Problem, BackwardCarriesItsSwitches) {
  BackwardArgs a;
  static_cast<AttentionArgs&>(a) = forward_of(1, 2, 1, 4, 5, 16);
  a.dout = a.dq = a.q;
  a.dk = a.dv = a.k;
  EXPECT_EQ(resolve(a, false).direction, Direction::backward);
  EXPECT_FALSE(resolve(a, false).has_dlse);
  EXPECT_FALSE(resolve(a, false).partial_kv);
  float dlse[8] = {};
  a.dlse = contiguous_stats(dlse, 2, 4);
  a.partial_kv = true;
  a.recipe.high_precision = kMatmulDQ | kMatmulS;
  const Problem p = resolve(a, false);
  EXPECT_TRUE(p.has_dlse);
  EXPECT_TRUE(p.partial_kv);
  EXPECT_TRUE(p.lifted(kMatmulDQ));
  EXPECT_FALSE(p.lifted(kMatmulDK));
}

TEST(Problem, DocumentsAreSequences) {
  ForwardArgs a = forward_of(1, 2, 1, 9, 12, 16);
  const int32_t cu_q[] = {0, 4, 4, 9};
  const int32_t cu_k[] = {0, 5, 11, 12};
  a.documents = {cu_q, cu_k, 3};
  const Problem p = resolve(a, false);
  EXPECT_TRUE(p.packed());
  ASSERT_EQ(p.num_sequences(), 3);
  const Sequence s = p.sequence(2);
  EXPECT_EQ(s.batch, 0);
  EXPECT_EQ(s.q_begin, 4);
  EXPECT_EQ(s.nq, 5);
  EXPECT_EQ(s.k_begin, 11);
  EXPECT_EQ(s.nk, 1);
  EXPECT_EQ(p.sequence(1).nq, 0);
  EXPECT_EQ(p.sequence(1).nk, 6);
}

/// Query i sees key j when i + shift - left <= j <= i + shift + right: written out key by key, for
/// every small shape.
TEST(Problem, VisibleKeysFollowTheDefinition) {
  int64_t checked = 0;
  for (const Align align : {Align::bottom_right, Align::top_left})
    for (const bool causal : {false, true})
      for (const int64_t left : {-1, 0, 1, 3, 100})
        for (const int64_t right : {-1, 0, 2, 100})
          for (int64_t nq = 0; nq <= 6; ++nq)
            for (int64_t nk = 0; nk <= 6; ++nk) {
              ForwardArgs a = forward_of(1, 1, 1, nq, nk, 8);
              a.mask = {causal, align, left, right};
              const Problem p = resolve(a, false);
              const Sequence s = p.sequence(0);
              const int64_t shift = align == Align::bottom_right ? nk - nq : 0;
              for (int64_t i = 0; i < nq; ++i) {
                const KeyRange range = p.visible(s, i);
                ASSERT_LE(0, range.begin);
                ASSERT_LE(range.begin, range.end);
                ASSERT_LE(range.end, nk);
                for (int64_t j = 0; j < nk; ++j, ++checked) {
                  bool sees = true;
                  if (left >= 0) sees = sees && j >= i + shift - left;
                  if (right >= 0) sees = sees && j <= i + shift + right;
                  if (causal) sees = sees && j <= i + shift;
                  ASSERT_EQ(j >= range.begin && j < range.end, sees)
                      << "nq " << nq << " nk " << nk << " i " << i << " j " << j << " window ("
                      << left << ", " << right << ") causal " << causal << " align "
                      << static_cast<int>(align);
                }
              }
            }
  EXPECT_EQ(checked, 2 * 2 * 5 * 4 * 21 * 21);
}

/// Both ends grow with the query: the loops over tiles rely on it.
TEST(Problem, VisibleRangesAreMonotone) {
  for (const int64_t left : {-1, 0, 2})
    for (const int64_t right : {-1, 0, 2})
      for (const auto& [nq, nk] : {std::pair{9, 4}, {4, 9}, {6, 6}, {5, 0}}) {
        ForwardArgs a = forward_of(1, 1, 1, nq, nk, 8);
        a.mask = {.causal = false,
                  .align = Align::bottom_right,
                  .window_left = left,
                  .window_right = right};
        const Problem p = resolve(a, false);
        for (int64_t i = 1; i < nq; ++i) {
          const KeyRange before = p.visible(p.sequence(0), i - 1),
                         now = p.visible(p.sequence(0), i);
          EXPECT_LE(before.begin, now.begin);
          EXPECT_LE(before.end, now.end);
        }
      }
}

/// "Everything" as the largest integer, which positions are added to.
TEST(Problem, LargestWindowIsOpen) {
  ForwardArgs a = forward_of(1, 1, 1, 5, 7, 8);
  a.mask.window_left = a.mask.window_right = std::numeric_limits<int64_t>::max();
  const Problem p = resolve(a, false);
  for (int64_t i = 0; i < 5; ++i) {
    const KeyRange range = p.visible(p.sequence(0), i);
    EXPECT_EQ(range.begin, 0);
    EXPECT_EQ(range.end, 7);
  }
}

/// Layouts a caller may write into: BHSD, BSHD, a slice of a fused buffer, an interleaved one.
TEST(Problem, WrittenLayoutsThatKeepElementsApart) {
  ForwardArgs a = forward_of(2, 4, 4, 5, 5, 16);
  for (const std::array<int64_t, 4>& stride : {std::array<int64_t, 4>{320, 80, 16, 1},
                                               {320, 16, 64, 1},
                                               {960, 16, 192, 1},
                                               {16, 32, 128, 1},
                                               {80, 160, 16, 1}}) {
    a.o.stride = stride;
    EXPECT_NO_THROW(resolve(a, false)) << stride[0] << ", " << stride[1] << ", " << stride[2];
  }
}

TEST(Names, OfEnums) {
  EXPECT_STREQ(dtype_name(Dtype::f32), "f32");
  EXPECT_STREQ(dtype_name(Dtype::bf16), "bf16");
  EXPECT_STREQ(dtype_name(Dtype::f16), "f16");
  EXPECT_STREQ(scheme_name(Scheme::paper), "paper");
  EXPECT_STREQ(scheme_name(Scheme::vectorwise), "vectorwise");
  std::string all;
  for (uint32_t bit = 1; bit <= kMatmulAll; bit <<= 1) all += std::string(matmul_name(bit)) + " ";
  EXPECT_EQ(all, "S O S' dV dP dQ dK ");
  EXPECT_EQ(matmul_name(0), nullptr);
  EXPECT_EQ(matmul_name(kMatmulS | kMatmulO), nullptr);
  EXPECT_EQ(matmul_name(1u << 7), nullptr);
}

TEST(Names, VersionAgreesWithItsParts) {
  EXPECT_EQ(std::string(version()), std::to_string(SAGEBWD_VERSION_MAJOR) + "." +
                                        std::to_string(SAGEBWD_VERSION_MINOR) + "." +
                                        std::to_string(SAGEBWD_VERSION_PATCH));
}

}  // namespace
}  // namespace sagebwd::spec
