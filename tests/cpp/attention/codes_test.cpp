// SPDX-License-Identifier: Apache-2.0
// The codes of the micro-kernels, given the recipe oracle's own operands, tile by tile. Codes of Q,
// K, V and dO must be equal. Codes of P and dS may be off by one where exp2 or a sum rounded
// differently, in at most one code of ten thousand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/math.h"
#include "cpu/scales.h"
#include "numerics/octaves.h"
#include "numerics/quantize.h"
#include "numerics/rotate.h"
#include "ref/attention_recipe.h"
#include "ref/recipe_inputs.h"
#include "support/attention_problem.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

using cpu::isa::Kernels;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Counts codes that differ.
struct CodeCount {
  int64_t total = 0, off_by_one = 0, worse = 0;
  void add(int got, int want) {
    ++total;
    off_by_one += std::abs(got - want) == 1;
    worse += std::abs(got - want) > 1;
  }
  void check(const char* name) const {
    EXPECT_GT(total, 0) << name;
    EXPECT_EQ(worse, 0) << name << ": of " << total;
    EXPECT_LE(static_cast<double>(off_by_one), 1e-4 * static_cast<double>(total))
        << name << ": of " << total;
  }
};

/// The oracle's two runs with everything a tile kernel needs besides the tile itself.
struct Oracle {
  explicit Oracle(const AttentionProblem& p)
      : one(one_head(reference(), p, 0, 0)), forward(ref::recipe_forward(one.head)) {
    in = {forward.o.data(), forward.lse.data(), one.dout.data(), nullptr, false};
    backward = ref::recipe_backward(one.head, in);
    for (int64_t i = 0; i < one.head.nq; ++i) {
      double mean = 0;
      for (int64_t c = 0; c < one.head.d; ++c)
        mean += static_cast<double>(one.q[i * one.head.d + c]) * forward.inputs.mu_k[c];
      const double lse = forward.lse[i];
      lse2.push_back(static_cast<float>((lse - one.head.scale * mean) / numerics::kLn2));
    }
  }
  const ref::RecipeInputs& inputs() const { return forward.inputs; }

  OneHead one;
  ref::RecipeForward forward;
  ref::RecipeBackwardIn in;
  ref::RecipeBackward backward;
  std::vector<float> lse2;
};

/// One tile's operands, padded to whole tiles with zeros as the blocked loops do.
struct Operands {
  Operands(const Oracle& x, const ref::RecipeTile& t)
      : tile_q(x.one.head.recipe.tile_q), tile_k(x.one.head.recipe.tile_k) {
    const ref::RecipeHead& head = x.one.head;
    const ref::RecipeInputs& in = x.inputs();
    const float unit = head.scale * numerics::kLog2e;
    sums.assign(static_cast<size_t>(tile_q * tile_k), 0);
    logit_factor.assign(tile_q, 0.0f), k_scale.assign(tile_k, 0.0f);
    shift.assign(tile_q, 0.0f), k_fold.assign(tile_k, 0.0f);
    begin.assign(tile_q, 0), end.assign(tile_q, 0);
    for (int64_t i = 0; i < t.rows; ++i) {
      logit_factor[i] = in.q_scale[t.q0 + i] * unit;
      shift[i] = ref::centre_logit(head, in, t.q0 + i, t.k0);
      const ref::Span seen = head.visible.inside(t.q0 + i, t.k0, t.k0 + t.cols);
      begin[i] = static_cast<int32_t>(seen.begin - t.k0);
      end[i] = static_cast<int32_t>(seen.end - t.k0);
      for (int64_t j = 0; j < t.cols; ++j)
        for (int64_t c = 0; c < head.d; ++c)
          sums[j * tile_q + i] += in.q8[(t.q0 + i) * head.d + c] * in.k8[(t.k0 + j) * head.d + c];
    }
    for (int64_t j = 0; j < t.cols; ++j) k_scale[j] = in.k_scale[t.k0 + j];
    for (int64_t j = 0; j < t.cols && t.backward; ++j) k_fold[j] = t.k_fold[j];
    for (int i = 0; i < tile_q; ++i) dither.push_back(numerics::dither_query_term(i));
  }
  /// A code stored as quads along keys.
  template <typename T>
  int quad(const std::vector<T>& codes, int64_t i, int64_t j) const {
    return codes[((i / 16 * (tile_k / 4) + j / 4) * 16 + i % 16) * 4 + j % 4];
  }

  int tile_q, tile_k;
  std::vector<int32_t> sums;
  std::vector<float> logit_factor, shift, k_scale, k_fold, dither;
  std::vector<int32_t> begin, end;
};

float p_levels(const Oracle& x) { return static_cast<float>(x.one.head.levels_of_p); }

float uniform(const Oracle& x, const ref::RecipeTile& t, numerics::DitherOperand operand) {
  const ref::RecipeHead& head = x.one.head;
  return numerics::dither_uniform(head.recipe.seed, head.sequence, head.head,
                                  t.q0 / head.recipe.tile_q, t.k0 / head.recipe.tile_k, operand);
}

void check_forward(const Kernels& kernels, const Oracle& x, CodeCount& p_codes) {
  const bool dither = x.one.head.recipe.dithers(kMatmulO);
  ref::recipe_forward(x.one.head, [&](const ref::RecipeTile& t) {
    if (t.p8 == nullptr) return;
    Operands o(x, t);
    std::vector<float> m(o.tile_q, -kInf), l(o.tile_q, 0.0f), alpha(o.tile_q), beta(o.tile_q);
    std::vector<float> v_log2(o.tile_k, 0.0f), v_inverse(o.tile_k, 1.0f);
    for (int64_t j = 0; j < t.cols; ++j)
      v_log2[j] = std::log2(t.v_scale[j]), v_inverse[j] = 1.0f / t.v_scale[j];
    std::vector<uint8_t> p8(o.sums.size());
    kernels.forward_tile({.tile_q = o.tile_q,
                          .tile_k = o.tile_k,
                          .s = o.sums.data(),
                          .s_is_float = false,
                          .k_scale = o.k_scale.data(),
                          .logit_factor = o.logit_factor.data(),
                          .bias = nullptr,
                          .shift = o.shift.data(),
                          .begin = o.begin.data(),
                          .end = o.end.data(),
                          .v_log2 = v_log2.data(),
                          .v_inverse = v_inverse.data(),
                          .m = m.data(),
                          .l = l.data(),
                          .logit_max = nullptr,
                          .alpha = alpha.data(),
                          .beta = beta.data(),
                          .p_float = false,
                          .p8 = p8.data(),
                          .p_levels = p_levels(x),
                          .dither_query = dither ? o.dither.data() : nullptr,
                          .dither_u = uniform(x, t, numerics::DitherOperand::p_forward)});
    for (int64_t i = 0; i < t.rows; ++i)
      for (int64_t j = 0; j < t.cols; ++j) p_codes.add(o.quad(p8, i, j), t.p8[i * t.cols + j]);
  });
}

struct BackwardCounts {
  CodeCount p, ds_query, ds_key;
};

void check_backward(const Kernels& kernels, const Oracle& x, BackwardCounts& counts) {
  const Recipe& recipe = x.one.head.recipe;
  ref::recipe_backward(x.one.head, x.in, [&](const ref::RecipeTile& t) {
    Operands o(x, t);
    const size_t size = o.sums.size();
    const std::vector<float> ones(o.tile_k, 1.0f);  // the oracle's dP has V's scale in it
    std::vector<float> dp(size, 0.0f), lse2(o.tile_q, kInf), delta(o.tile_q, 0.0f);
    std::vector<float> q_scale(o.tile_q, 0.0f), do_scale(o.tile_q, 0.0f);
    std::vector<float> p_scale(o.tile_k), key_scale(o.tile_k), query_scale(o.tile_q);
    std::vector<int32_t> start(o.tile_q), key_max(static_cast<size_t>(2 * o.tile_k * 16));
    std::vector<uint8_t> p8(size);
    std::vector<int8_t> ds8_key(size), ds8_query(size);
    for (int64_t i = 0; i < t.rows; ++i) {
      lse2[i] = x.lse2[t.q0 + i];
      delta[i] = x.backward.delta[t.q0 + i];
      q_scale[i] = t.q_scale[i], do_scale[i] = t.do_scale[i];
      for (int64_t j = 0; j < t.cols; ++j) dp[j * o.tile_q + i] = t.dp[i * t.cols + j];
    }
    using enum numerics::DitherOperand;
    kernels.backward_tile({.tile_q = o.tile_q,
                           .tile_k = o.tile_k,
                           .s = o.sums.data(),
                           .s_is_float = false,
                           .dp = dp.data(),
                           .v_scale = ones.data(),
                           .k_scale = o.k_scale.data(),
                           .logit_factor = o.logit_factor.data(),
                           .bias = nullptr,
                           .shift = o.shift.data(),
                           .begin = o.begin.data(),
                           .end = o.end.data(),
                           .lse2 = lse2.data(),
                           .delta = delta.data(),
                           .q_scale = q_scale.data(),
                           .do_scale = do_scale.data(),
                           .k_fold = o.k_fold.data(),
                           .per_vector = recipe.scheme != Scheme::paper,
                           .dv_float = false,
                           .dq_float = false,
                           .dk_float = false,
                           .query_sum = nullptr,
                           .key_sum = nullptr,
                           .key_max = key_max.data(),
                           .p8 = p8.data(),
                           .ds8_key = ds8_key.data(),
                           .ds8_query = ds8_query.data(),
                           .p_scale = p_scale.data(),
                           .ds_key_scale = key_scale.data(),
                           .ds_query_scale = query_scale.data(),
                           .ds_query_start = start.data(),
                           .dither_p = {recipe.dithers(kMatmulDV), uniform(x, t, p_backward)},
                           .dither_ds_query = {recipe.dithers(kMatmulDQ), uniform(x, t, ds_query)},
                           .dither_ds_key = {recipe.dithers(kMatmulDK), uniform(x, t, ds_key)},
                           .dither_query = o.dither.data(),
                           .p_levels = p_levels(x)});
    for (int64_t i = 0; i < t.rows; ++i)
      for (int64_t j = 0; j < t.cols; ++j) {
        const int64_t at = j * o.tile_q + i, want = i * t.cols + j;
        counts.p.add(p8[at], t.p8[want]);
        counts.ds_key.add(static_cast<int8_t>(ds8_key[at] ^ kernels.flip), t.ds8_key[want]);
        counts.ds_query.add(o.quad(ds8_query, i, j), t.ds8_query[want]);
      }
    for (int64_t j = 0; j < t.cols; ++j) {
      EXPECT_NEAR(p_scale[j], t.p_scale[j], 1e-5f * t.p_scale[j]);
      EXPECT_NEAR(key_scale[j], t.ds_scale_key[j], 1e-4f * t.ds_scale_key[j]);
    }
    for (int64_t i = 0; i < t.rows; ++i)
      EXPECT_NEAR(query_scale[i], t.ds_scale_query[i], 1e-4f * t.ds_scale_query[i]);
  });
}

/// A tensor [n, d] with the codes and scales that the oracle made of it.
struct Quantised {
  const char* name;
  const std::vector<float>& x;
  const std::vector<int8_t>& codes;
  const std::vector<float>& scales;
  const float* mean = nullptr;  // removed first; one per mean_tokens tokens
  int64_t mean_tokens = 0;      // 0: one for all
  bool rotated = false;
  // Of octaves, removed after the rotation.
  const int8_t* centre8 = nullptr;
  const float* centre_scale = nullptr;
};

/// The same codes and scales through the kernels: magnitudes, then scale(amax, count) for each run
/// of `tokens`, then codes.
template <typename Scale>
void check_rows(const Kernels& kernels, int64_t d, int64_t tokens, const Quantised& t,
                Scale scale) {
  const int ld = static_cast<int>(round_up(d, 16));
  const int64_t n = static_cast<int64_t>(t.x.size()) / d;
  for (int64_t first = 0; first < n; first += tokens) {
    const int rows = static_cast<int>(std::min(tokens, n - first));
    std::vector<float> padded(static_cast<size_t>(rows * ld), 0.0f), scales(rows);
    std::vector<int8_t> got(static_cast<size_t>(rows * ld));
    for (int r = 0; r < rows; ++r) {
      const int64_t of = t.mean_tokens == 0 ? 0 : (first + r) / t.mean_tokens;
      for (int64_t c = 0; c < d; ++c)
        padded[r * ld + c] =
            t.x[(first + r) * d + c] - (t.mean != nullptr ? t.mean[of * d + c] : 0.0f);
      if (t.rotated) numerics::rotate(&padded[r * ld], static_cast<int>(d));
      if (t.centre8 == nullptr) continue;
      const int octave = numerics::octave_of_block((first + r) / kKeysPerScale);
      for (int64_t c = 0; c < d; ++c)
        padded[r * ld + c] -=
            t.centre_scale[octave] * static_cast<float>(t.centre8[octave * d + c]);
    }
    kernels.row_magnitudes(padded.data(), ld, rows, scales.data());
    scale(scales.data(), rows);
    kernels.encode_rows(padded.data(), ld, rows, scales.data(), got.data(), ld);
    for (int r = 0; r < rows; ++r) {
      ASSERT_EQ(scales[r], t.scales[first + r]) << t.name << " token " << first + r;
      for (int64_t c = 0; c < d; ++c)
        ASSERT_EQ(got[r * ld + c], t.codes[(first + r) * d + c])
            << t.name << " token " << first + r << " channel " << c;
    }
  }
}

const char* const kCases[] = {
    "n512 d64 bf16",
    "n512 d64 bf16 paper",
    "nq300 nk450 d80 f32 causal",
    "nq300 nk450 d72 f16 paper causal align=top_left",
    "n400 d64 rounding=dither seed3",
    "n400 d64 paper rounding=dither window=100,20 seed4",
    "nq300 nk300 d64 tile=128x64",
    "nq300 nk300 d24 tile=64x256 paper smooth_k=off",
    "n400 d96 rounding=dither:dQ",
    "nq300 nk450 d64 tile=64x64 causal",
    "n300 d80 f32 smooth_k=off rotate=off",
    "n300 d64 paper rotate=on",
};

class Codes : public PerKernelTable {
 protected:
  /// With the levels of P that these kernels have.
  AttentionProblem make_problem(const char* text) const {
    AttentionProblem p = testing::make_problem(text);
    p.levels_of_p = spec::p_levels(p.c.recipe.scheme, kernels().p_levels);
    return p;
  }
};

TEST_P(Codes, OfInputsAreEqualToTheOracles) {
  for (const char* text : kCases)
    for (bool smooth_q : {false, true}) {
      AttentionProblem p = make_problem(text);
      const bool paper = p.c.recipe.scheme == Scheme::paper;
      p.c.recipe.smooth_q = smooth_q && paper;
      SCOPED_TRACE(p.describe());
      const Oracle x(p);
      const ref::RecipeHead& h = x.one.head;
      const ref::RecipeInputs& in = x.inputs();
      const Recipe& r = h.recipe;
      const int64_t q_tokens = paper ? r.tile_q : 1, k_tokens = paper ? r.tile_k : 1;
      check_rows(kernels(), h.d, q_tokens,
                 {"Q", x.one.q, in.q8, in.q_scale, in.mu_q.data(), r.tile_q, r.rotate},
                 cpu::scale_together);
      check_rows(kernels(), h.d, k_tokens,
                 {"K", x.one.k, in.k8, in.k_scale, in.mu_k.data(), 0, r.rotate, in.centre8.data(),
                  in.centre_scale.data()},
                 paper ? cpu::scale_together : cpu::scale_lone_keys);
      check_rows(kernels(), h.d, k_tokens,
                 {"V", x.one.v, in.v8, in.v_scale, nullptr, 0, false, in.v_centre8.data(),
                  in.v_centre_scale.data()},
                 paper ? cpu::scale_together : cpu::scale_lone_values);
      check_rows(kernels(), h.d, q_tokens, {"dO", x.one.dout, x.backward.do8, x.backward.do_scale},
                 cpu::scale_together);
      if (HasFatalFailure()) return;
    }
}

TEST_P(Codes, OfForwardPAreTheOraclesUpToRounding) {
  for (const char* text : kCases) {
    const AttentionProblem p = make_problem(text);
    SCOPED_TRACE(p.describe());
    CodeCount count;
    check_forward(kernels(), Oracle(p), count);
    count.check("P");
  }
}

TEST_P(Codes, OfBackwardPAndDsAreTheOraclesUpToRounding) {
  for (const char* text : kCases) {
    const AttentionProblem p = make_problem(text);
    SCOPED_TRACE(p.describe());
    BackwardCounts counts;
    check_backward(kernels(), Oracle(p), counts);
    counts.p.check("P");
    counts.ds_query.check("dS by query");
    counts.ds_key.check("dS by key");
  }
}

SAGE_FOR_KERNEL_TABLES(Codes);

}  // namespace
}  // namespace sagebwd::testing
