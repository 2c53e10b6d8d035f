// SPDX-License-Identifier: Apache-2.0
// One score tile of the backward. Floating-point results are compared with FP64 formulas; scales
// and codes must then follow bit for bit from the kernel's own floating-point results. Row and
// column ranges differ by four orders of magnitude and tiles are not square, so that swapped scales
// show.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "numerics/quantize.h"
#include "support/implementations.h"
#include "support/random.h"

namespace sagebwd::testing {
namespace {

using cpu::isa::BackwardTile;
using cpu::isa::Kernels;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Options {
  int tile_q = 64, tile_k = 128;
  bool per_vector = true, masked = false, s_is_float = false, sums = true;
  bool dither_p = false, dither_ds_query = false, dither_ds_key = false;
  bool dv_float = false, dq_float = false, dk_float = false;
};

/// A tile with all its memory; matrices are [tile_k][tile_q].
struct Tile {
  Tile(const Options& o, uint64_t seed) : options(o) {
    Random random(seed);
    const int q = o.tile_q, k = o.tile_k;
    const auto uniform = [&](int n, float low, float high) {
      std::vector<float> x;
      for (int i = 0; i < n; ++i) x.push_back(random.between(low, high));
      return x;
    };
    for (int i = 0; i < q * k; ++i) {
      sums.push_back(static_cast<int32_t>(random.integer(-40000, 40000)));
      dp.push_back(random.between(-3.0f, 3.0f));
    }
    scores.assign(sums.begin(), sums.end());
    for (int j = 0; j < k; ++j) k_scale.push_back(std::exp2(random.between(-8.0f, -7.0f)));
    for (int j = 0; j < k; ++j) v_scale.push_back(std::exp2(random.between(-7.0f, 0.0f)));
    for (int i = 0; i < q; ++i) {
      logit_factor.push_back(std::exp2(random.between(-8.0f, -7.0f)));
      do_scale.push_back(std::exp2(random.between(-14.0f, 0.0f)));
      q_scale.push_back(std::exp2(random.between(-14.0f, 0.0f)));
      dither_query.push_back(numerics::dither_query_term(i));
    }
    for (int j = 0; j < k; ++j) k_fold.push_back(std::exp2(random.between(-14.0f, 0.0f)));
    bias = uniform(k, -2.0f, 2.0f);
    lse2 = uniform(q, 2.0f, 6.0f);
    delta = uniform(q, -1.0f, 1.0f);
    for (float& u : dither_u) u = random.unit();
    if (o.masked) {
      for (int i = 0; i < q; ++i) {
        begin.push_back(i % 5 == 2 ? i / 3 % k : 0);
        end.push_back(std::min(k, i + 1));
      }
      begin[9] = end[9] = 0;
    }
    query_sum = uniform(q, -1.0f, 1.0f);
    query_sum_before = query_sum;
    key_sum.assign(k, -9.0f);
    key_max.assign(2 * k * 16, 0x12345678);
    p8.assign(static_cast<size_t>(q * k), 33);
    for (auto* x : {&ds8_key, &ds8_query}) x->assign(static_cast<size_t>(q * k), 33);
    p_scale.assign(k, -9.0f), ds_key_scale.assign(k, -9.0f), ds_query_scale.assign(q, -9.0f);
    ds_query_start.assign(q, 99);
  }

  void run(const Kernels& kernels) {
    dp_in = dp;
    void* s = options.s_is_float ? static_cast<void*>(scores.data()) : sums.data();
    scores_in = scores;
    kernels.backward_tile({.tile_q = options.tile_q,
                           .tile_k = options.tile_k,
                           .s = s,
                           .s_is_float = options.s_is_float,
                           .dp = dp.data(),
                           .v_scale = v_scale.data(),
                           .k_scale = k_scale.data(),
                           .logit_factor = logit_factor.data(),
                           .bias = bias.data(),
                           .begin = options.masked ? begin.data() : nullptr,
                           .end = options.masked ? end.data() : nullptr,
                           .lse2 = lse2.data(),
                           .delta = delta.data(),
                           .q_scale = q_scale.data(),
                           .do_scale = do_scale.data(),
                           .k_fold = k_fold.data(),
                           .per_vector = options.per_vector,
                           .dv_float = options.dv_float,
                           .dq_float = options.dq_float,
                           .dk_float = options.dk_float,
                           .query_sum = options.sums ? query_sum.data() : nullptr,
                           .key_sum = options.sums ? key_sum.data() : nullptr,
                           .key_max = key_max.data(),
                           .p8 = p8.data(),
                           .ds8_key = ds8_key.data(),
                           .ds8_query = ds8_query.data(),
                           .p_scale = p_scale.data(),
                           .ds_key_scale = ds_key_scale.data(),
                           .ds_query_scale = ds_query_scale.data(),
                           .ds_query_start = ds_query_start.data(),
                           .dither_p = {options.dither_p, dither_u[0]},
                           .dither_ds_query = {options.dither_ds_query, dither_u[1]},
                           .dither_ds_key = {options.dither_ds_key, dither_u[2]},
                           .dither_query = dither_query.data(),
                           .p_levels = p_levels = static_cast<float>(kernels.p_levels)});
    p_fold.resize(dp.size());
    std::memcpy(p_fold.data(), s, dp.size() * sizeof(float));
  }
  bool visible(int i, int j) const { return !options.masked || (begin[i] <= j && j < end[i]); }
  int at(int i, int j) const { return j * options.tile_q + i; }
  int query_code(int i, int j) const {
    return ds8_query[((i / 16 * (options.tile_k / 4) + j / 4) * 16 + i % 16) * 4 + j % 4];
  }

  Options options;
  std::vector<int32_t> sums;
  std::vector<float> scores, scores_in, dp, dp_in, k_scale, v_scale, logit_factor, bias, lse2,
      delta, q_scale, do_scale, k_fold, query_sum, query_sum_before, key_sum, p_scale, ds_key_scale,
      ds_query_scale, dither_query, p_fold;
  std::vector<int32_t> begin, end, key_max, ds_query_start;
  std::vector<uint8_t> p8;
  std::vector<int8_t> ds8_key, ds8_query;
  float dither_u[3] = {}, p_levels = 0.0f;
};

/// P, dS and their sums against FP64.
void check_gradients(const Tile& t) {
  const Options& o = t.options;
  std::vector<double> query_sum(o.tile_q, 0.0), key_sum(o.tile_k, 0.0);
  for (int j = 0; j < o.tile_k; ++j)
    for (int i = 0; i < o.tile_q; ++i) {
      const int at = t.at(i, j);
      const double s2 =
          static_cast<double>(t.scores_in[at]) * t.k_scale[j] * t.logit_factor[i] + t.bias[j];
      const double p = t.visible(i, j) ? std::exp2(s2 - t.lse2[i]) : 0.0;
      const double dp = static_cast<double>(t.dp_in[at]) * t.v_scale[j];
      const double ds = p * (dp - t.delta[i]);
      const double fold = o.dv_float ? 1.0 : t.do_scale[i];
      ASSERT_NEAR(t.p_fold[at], p * fold, 3e-6 * p * fold) << "P at " << i << ", " << j;
      ASSERT_NEAR(t.dp[at], ds, 3e-6 * p * 4) << "dS at " << i << ", " << j;
      query_sum[i] += ds, key_sum[j] += ds;
    }
  if (!o.sums) return;
  for (int i = 0; i < o.tile_q; ++i)
    ASSERT_NEAR(t.query_sum[i], query_sum[i] + t.query_sum_before[i], 1e-3) << i;
  for (int j = 0; j < o.tile_k; ++j) ASSERT_NEAR(t.key_sum[j], key_sum[j], 1e-3) << j;
}

/// Scales of lines from their maxima: as they are, or the tile's largest finite one for all.
std::vector<float> scales_of(std::vector<float> amax, bool per_vector, float levels) {
  float largest = 0.0f;
  for (float x : amax)
    if (std::isfinite(x)) largest = std::max(largest, x);
  for (float& x : amax)
    x = numerics::scale_of(!per_vector && std::isfinite(x) ? largest : x, levels);
  return amax;
}

void expect_same_scale(float got, float want) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got));
  } else {
    EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want));
  }
}

void larger(float& top, float x) {
  if (!(std::fabs(x) <= top)) top = std::isnan(top) ? top : std::fabs(x);
}

/// operand: 0 for P, 1 for dS by query, 2 for dS by key.
int code_of(const Tile& t, int operand, float x, float scale, int i, int j) {
  const Options& o = t.options;
  const bool dithered[] = {o.dither_p, o.dither_ds_query, o.dither_ds_key};
  const float inverse = numerics::inverse_of(scale);
  if (!dithered[operand]) return numerics::code_nearest(x, inverse);
  return numerics::code_dither(
      x, inverse,
      numerics::dither_offset(numerics::dither_query_term(i),
                              numerics::dither_key_term(j, t.dither_u[operand])),
      operand == 0 ? t.p_levels : numerics::kLevels);
}

/// Scales and codes from the kernel's own P and dS. A line whose scale is NaN may hold any codes.
void check_codes(const Tile& t, uint8_t flip) {
  const Options& o = t.options;
  std::vector<float> p_max(o.tile_k, 0.0f), key_max(o.tile_k, 0.0f), query_max(o.tile_q, 0.0f);
  for (int j = 0; j < o.tile_k; ++j)
    for (int i = 0; i < o.tile_q; ++i) {
      if (!t.visible(i, j)) continue;
      larger(p_max[j], t.p_fold[t.at(i, j)]);
      larger(key_max[j], t.dp[t.at(i, j)] * t.q_scale[i]);
      larger(query_max[i], t.dp[t.at(i, j)] * t.k_fold[j]);
    }
  const std::vector<float> p_scale = scales_of(p_max, o.per_vector, t.p_levels),
                           key_scale = scales_of(key_max, o.per_vector, numerics::kLevels),
                           query_scale = scales_of(query_max, o.per_vector, numerics::kLevels);
  for (int j = 0; j < o.tile_k; ++j) {
    if (!o.dv_float) expect_same_scale(t.p_scale[j], p_scale[j]);
    if (!o.dk_float) expect_same_scale(t.ds_key_scale[j], key_scale[j]);
  }
  for (int i = 0; i < o.tile_q && !o.dq_float; ++i)
    expect_same_scale(t.ds_query_scale[i], query_scale[i]);

  for (int i = 0; i < o.tile_q; ++i) {
    int sum = 0;
    for (int j = 0; j < o.tile_k; ++j) {
      const int at = t.at(i, j);
      const float ds = t.dp[at];
      const bool seen = t.visible(i, j);
      if (!o.dv_float && !std::isnan(p_scale[j])) {
        ASSERT_EQ(t.p8[at], seen ? code_of(t, 0, t.p_fold[at], p_scale[j], i, j) : 0)
            << "P at " << i << ", " << j;
      }
      if (!o.dk_float && !std::isnan(key_scale[j])) {
        ASSERT_EQ(static_cast<int8_t>(t.ds8_key[at] ^ flip),
                  seen ? code_of(t, 2, ds * t.q_scale[i], key_scale[j], i, j) : 0)
            << "dS by key at " << i << ", " << j;
      }
      if (!o.dq_float && !std::isnan(query_scale[i])) {
        ASSERT_EQ(t.query_code(i, j),
                  seen ? code_of(t, 1, ds * t.k_fold[j], query_scale[i], i, j) : 0)
            << "dS by query at " << i << ", " << j;
      }
      sum += t.query_code(i, j);
    }
    if (flip != 0 && !o.dq_float && !std::isnan(query_scale[i])) {
      ASSERT_EQ(t.ds_query_start[i], -flip * sum) << i;
    }
  }
}

class BackwardTiles : public PerKernelTable {
 protected:
  void check(const Options& o, uint64_t seed) {
    SCOPED_TRACE(::testing::Message()
                 << "tile " << o.tile_q << "x" << o.tile_k << " per_vector " << o.per_vector
                 << " masked " << o.masked << " float " << o.s_is_float << " dither " << o.dither_p
                 << o.dither_ds_query << o.dither_ds_key);
    Tile t(o, seed);
    t.run(kernels());
    check_gradients(t);
    if (!HasFailure()) check_codes(t, kernels().flip);
  }
};

TEST_P(BackwardTiles, GradientsScalesAndCodes) {
  uint64_t seed = 1;
  for (auto [q, k] : {std::pair{64, 128}, {128, 64}, {256, 64}, {64, 256}, {192, 128}})
    for (bool per_vector : {true, false})
      for (bool masked : {true, false})
        for (bool s_is_float : {true, false})
          check({.tile_q = q,
                 .tile_k = k,
                 .per_vector = per_vector,
                 .masked = masked,
                 .s_is_float = s_is_float},
                seed++);
}

/// Each of the three operands is dithered or not, whatever the others are.
TEST_P(BackwardTiles, DitheredCodes) {
  for (int dithered = 0; dithered < 8; ++dithered)
    for (bool per_vector : {true, false})
      check({.tile_q = 128,
             .tile_k = 64,
             .per_vector = per_vector,
             .masked = dithered % 2 == 0,
             .dither_p = (dithered & 1) != 0,
             .dither_ds_query = (dithered & 2) != 0,
             .dither_ds_key = (dithered & 4) != 0},
            static_cast<uint64_t>(dithered + 1));
}

TEST_P(BackwardTiles, LiftedMatmulsTakeUnfoldedValues) {
  for (int lifted = 0; lifted < 8; ++lifted)
    check({.sums = lifted % 2 == 0,
           .dv_float = (lifted & 1) != 0,
           .dq_float = (lifted & 2) != 0,
           .dk_float = (lifted & 4) != 0},
          static_cast<uint64_t>(lifted + 1));
}

/// A row with LSE = -inf is given as +inf: P, dS and all codes are exactly zero.
TEST_P(BackwardTiles, RowsWithoutKeysAreZero) {
  Tile t({}, 3);
  for (int i : {0, 17, 63}) t.lse2[i] = kInf;
  t.run(kernels());
  for (int i : {0, 17, 63})
    for (int j = 0; j < t.options.tile_k; ++j) {
      EXPECT_EQ(t.p_fold[t.at(i, j)], 0.0f);
      EXPECT_EQ(t.dp[t.at(i, j)], 0.0f);
      EXPECT_EQ(t.query_code(i, j), 0);
    }
  check_codes(t, kernels().flip);
}

/// NaN of one query (its scales, delta) or one key spoils that line's scales, and masked pairs
/// none.
TEST_P(BackwardTiles, NanSpreadsOverVisiblePairsOnly) {
  for (bool per_vector : {true, false}) {
    Tile t({.tile_q = 64, .tile_k = 64, .per_vector = per_vector, .masked = true}, 4);
    t.do_scale[20] = t.delta[20] = std::nanf("");
    t.k_scale[40] = t.k_fold[40] = -std::nanf("");
    t.run(kernels());
    for (int j = 0; j < 64; ++j) {
      const bool hit = t.visible(20, j) || j == 40;
      EXPECT_EQ(std::isnan(t.p_scale[j]), hit) << "key " << j;
      EXPECT_EQ(std::isnan(t.ds_key_scale[j]), hit) << "key " << j;
    }
    for (int i = 0; i < 64; ++i)
      EXPECT_EQ(std::isnan(t.ds_query_scale[i]), i == 20 || t.visible(i, 40)) << "query " << i;
    check_codes(t, kernels().flip);
  }
}

/// Gradients far below FP32's usual range keep their codes; below 2^-100 they are zero, not NaN.
TEST_P(BackwardTiles, TinyGradients) {
  Tile reference({}, 5);
  reference.run(kernels());
  for (int shift : {-40, -60}) {
    Tile t({}, 5);
    for (float& x : t.dp) x = std::ldexp(x, shift);
    for (float& x : t.delta) x = std::ldexp(x, shift);
    t.run(kernels());
    EXPECT_EQ(t.ds8_key, reference.ds8_key) << shift;
    EXPECT_EQ(t.ds8_query, reference.ds8_query) << shift;
  }
  Tile gone({.sums = false}, 5);
  for (float& x : gone.dp) x = std::ldexp(x, -110);
  for (float& x : gone.delta) x = std::ldexp(x, -110);
  gone.run(kernels());
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(gone.ds_query_scale[i], 0.0f);
    for (int j = 0; j < 128; ++j) EXPECT_EQ(gone.query_code(i, j), 0);
  }
}

SAGE_FOR_KERNEL_TABLES(BackwardTiles);

}  // namespace
}  // namespace sagebwd::testing
