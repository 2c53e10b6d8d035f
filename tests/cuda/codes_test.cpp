// SPDX-License-Identifier: Apache-2.0
// The codes, scales and means that the tuned backend hands to its main kernels, read from the
// workspace and compared with the recipe oracle's bit for bit, in every form they are stored in.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/dispatch_dtype.h"
#include "cuda/sm80/workspace.h"
#include "device_case.h"
#include "numerics/octaves.h"
#include "numerics/quantize.h"
#include "ref/recipe_inputs.h"

namespace sagebwd::gpu {
namespace {

using cuda::kSlab;

/// Order of 16 contraction indices in transposed copies: of accumulators as they are, and turned.
constexpr std::array<int, 16> kPermuted = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
constexpr std::array<int, 16> kTurned = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
int64_t turned_row(int64_t c) { return c / 32 * 32 + c / 2 % 4 * 8 + c / 8 % 4 * 2 + c % 2; }

/// Counts places that differ, and keeps the first.
struct Differences {
  int64_t count = 0;
  std::string first;
  void expect(bool same, const char* what, int64_t head, int64_t token, int64_t channel) {
    if (same || count++ > 0) return;
    first = std::string(what) + " head " + std::to_string(head) + " token " +
            std::to_string(token) + " channel " + std::to_string(channel);
  }
};

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}
/// The sign of a zero mean means something else.
bool same_mean(float a, float b) { return same(a, b) || (a == 0.0f && b == 0.0f); }
bool near(float a, float b, float scale) {
  return same(a, b) || std::fabs(a - b) <= 1e-5f * (scale + std::fabs(b));
}

/// A 16-bit value as the kernels store it.
float half_at(const uint16_t* x, int64_t i, Dtype dtype) {
  return with_dtype(dtype, [&](auto type) {
    decltype(type) value{};
    std::memcpy(&value, x + i, sizeof(uint16_t));
    return to_float(value);
  });
}

/// One direction's workspace, its problem, and the oracle's view of one head of one sequence.
struct Inside {
  const spec::Problem& p;
  cuda::tuned::Plan plan;
  const CaseInputs& in;
  backend::Tiles tiles;
  Differences& diff;

  int64_t D() const { return plan.padded_d; }
  int64_t q_pad(int64_t t) const {
    return cuda::kBlock * (p.packed() ? plan.blocks.documents[static_cast<size_t>(t)].q_block
                                      : t * ((p.nq + cuda::kBlock - 1) / cuda::kBlock));
  }
  int64_t k_pad(int64_t t) const {
    return cuda::kBlock * (p.packed() ? plan.blocks.documents[static_cast<size_t>(t)].k_block
                                      : t * ((p.nk + cuda::kBlock - 1) / cuda::kBlock));
  }
  const float* rows(const std::vector<float>& x, int64_t batch, int64_t head, int64_t heads,
                    int64_t token, int64_t n) const {
    return x.data() + ((batch * heads + head) * n + token) * p.d;
  }
  bool paper() const { return p.recipe.scheme == Scheme::paper; }
  /// Keys that share a v_tile_scale: not those of a tile, where block lists have smaller ones.
  int64_t scale_keys() const { return paper() ? tiles.k : cuda::kBlock; }
  ref::RecipeOperands oracle(int64_t t, int64_t head, int64_t kv_head) const {
    const spec::Sequence s = p.sequence(t);
    ref::RecipeHead h;
    h.nq = s.nq, h.nk = s.nk, h.d = p.d, h.scale = p.scale, h.recipe = p.recipe;
    h.recipe.tile_q = tiles.q, h.recipe.tile_k = tiles.k;
    h.q = rows(in.x.q, s.batch, head, p.h, s.q_begin, p.nq);
    h.k = rows(in.x.k, s.batch, kv_head, p.hk, s.k_begin, p.nk);
    h.v = rows(in.x.v, s.batch, kv_head, p.hk, s.k_begin, p.nk);
    return ref::make_operands(h);
  }

  /// codes [n, d] against [heads, tokens, D] from row `row0` on, padding included.
  void rows_equal(const char* what, const int8_t* got, int64_t row0,
                  const std::vector<int8_t>& want, int64_t n, int64_t head) const {
    for (int64_t i = 0; i < padded(n); ++i)
      for (int64_t c = 0; c < D(); ++c)
        diff.expect(got[(row0 + i) * D() + c] == code(want, n, i, c), what, head, i, c);
  }
  void transposed_equal(const char* what, const int8_t* got, int64_t row0,
                        const std::vector<int8_t>& want, int64_t n, int64_t head,
                        bool turned) const {
    for (int64_t i = 0; i < padded(n); ++i)
      for (int64_t c = 0; c < D(); ++c) {
        const auto& order = turned ? kTurned : kPermuted;
        const int64_t piece = i / 16 * 16;  // position i of a row holds this token
        const int64_t token = piece + order[static_cast<size_t>(i % 16)];
        const int64_t at =
            ((row0 + i) / kSlab * D() + (turned ? turned_row(c) : c)) * kSlab + (row0 + i) % kSlab;
        diff.expect(got[at] == code(want, n, token, c), what, head, token, c);
      }
  }
  static int64_t padded(int64_t n) { return (n + cuda::kBlock - 1) / cuda::kBlock * cuda::kBlock; }
  int8_t code(const std::vector<int8_t>& want, int64_t n, int64_t i, int64_t c) const {
    return i < n && c < p.d ? want[static_cast<size_t>(i * p.d + c)] : int8_t{0};
  }
  void copies_equal(const char* what, const uint16_t* got, int64_t row0, const float* want,
                    int64_t begin, int64_t end, int64_t head) const {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t c = 0; c < p.d; ++c)
        diff.expect(same(half_at(got, (row0 + i) * D() + c, p.dtype), want[i * p.d + c]), what,
                    head, i, c);
  }

  void keys_equal(const cuda::sm80::SharedSpace& ws, const ref::RecipeInputs& want, int64_t t,
                  int64_t head) const {
    const spec::Sequence s = p.sequence(t);
    const int64_t row0 = head * plan.tk + k_pad(t);
    for (int64_t c = 0; c < D() && paper(); ++c)
      diff.expect(same_mean(ws.k_mean[(t * p.hk + head) * D() + c],
                            c < p.d ? want.mu_k[static_cast<size_t>(c)] : 0.0f),
                  "k_mean", head, t, c);
    const auto centres_equal = [&](const cuda::tuned::Centres& got,
                                   const std::vector<int8_t>& codes,
                                   const std::vector<float>& scales) {
      for (int octave = 0; octave < numerics::octaves_of(s.nk); ++octave) {
        const int64_t row = got.row(static_cast<int>(head), k_pad(t) / cuda::kBlock,
                                    numerics::first_block_of(octave));
        const auto at = static_cast<size_t>(octave);
        diff.expect(same(got.scale[row], scales[at]), "centre scale", head, octave, 0);
        for (int64_t c = 0; c < p.d; ++c)
          diff.expect(got.codes[row * p.d + c] ==
                          codes[at * static_cast<size_t>(p.d) + static_cast<size_t>(c)],
                      "centre", head, octave, c);
      }
    };
    if (!paper()) {
      centres_equal(ws.centres, want.centre8, want.centre_scale);
      centres_equal(ws.value_centres, want.v_centre8, want.v_centre_scale);
    }
    rows_equal("k8", ws.k8, row0, want.k8, s.nk, head);
    for (int64_t i = 0; i < s.nk; ++i) {
      const float scale = k_scale(want, i);
      const cuda::sm80::KeyScale got = ws.k_scale[row0 + i];
      const bool poisoned = std::isnan(scale);  // the offset is then that of its neighbours
      diff.expect(same(got.scale, scale) && (poisoned || same(got.offset, -12582912.0f * scale)),
                  "k_scale", head, i, 0);
    }
  }
  /// The scale of a key: rounded to 22 bits, and never zero.
  static float k_scale(const ref::RecipeInputs& want, int64_t i) {
    const float scale = want.k_scale[static_cast<size_t>(i)];
    if (scale == 0.0f) return 0x1p-60f;
    return std::isfinite(scale) ? std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + 2u) & ~3u)
                                : scale;
  }
  /// What the centre of an octave adds to the logits of query i; not in `paper`.
  float centre_logit(const ref::RecipeOperands& want, int64_t i, int octave) const {
    ref::RecipeHead h;
    h.d = p.d, h.scale = p.scale, h.recipe = p.recipe;
    return ref::centre_logit(h, want.inputs, i, numerics::first_block_of(octave) * cuda::kBlock);
  }
  /// K as dQ is made from it, but in `paper`.
  void dq_keys_equal(const cuda::sm80::BackwardSpace& ws, const ref::RecipeOperands& want,
                     int64_t t, int64_t head) const {
    const spec::Sequence s = p.sequence(t);
    const int64_t row0 = head * plan.tk + k_pad(t);
    std::vector<int8_t> codes;
    for (float code : want.dq_keys) codes.push_back(static_cast<int8_t>(code));
    transposed_equal("k8t", ws.k8t, row0, codes, s.nk, head, true);
    for (int64_t j = 0; j < s.nk; ++j)
      diff.expect(same(ws.dq_keys.scale[(row0 + j) / kSlab], want.dq_fold[static_cast<size_t>(j)]),
                  "dq scale", head, j, 0);
    for (int64_t c = 0; c < p.d; ++c)
      diff.expect(same_mean(ws.dq_keys.mean[(t * p.hk + head) * D() + c],
                            want.dq_mean[static_cast<size_t>(c)]),
                  "dq mean", head, t, c);
  }
  float logit_factor(const ref::RecipeInputs& want, int64_t i) const {
    const float x = want.q_scale[static_cast<size_t>(i)] * (p.scale * numerics::kLog2e);
    return x == 0.0f ? 0x1p-60f : x;
  }
};

void check_forward(const Workspace& w, const CaseInputs& in, Differences& diff) {
  const spec::Problem& p = w.problem;
  const Inside x{p, cuda::tuned::Plan(p), in, cuda::sm80::tiles_of(p), diff};
  cuda::Arena arena(const_cast<std::byte*>(w.bytes.data()));
  const cuda::sm80::ForwardSpace ws(p, x.plan, arena);
  for (int64_t t = 0; t < p.num_sequences(); ++t)
    for (int64_t head = 0; head < p.h; ++head) {
      const int64_t kv = head / p.group(), k0 = kv * x.plan.tk + x.k_pad(t);
      const spec::Sequence s = p.sequence(t);
      const ref::RecipeInputs want = x.oracle(t, head, kv).inputs;
      const int64_t q0 = head * x.plan.tq + x.q_pad(t);
      x.rows_equal("q8", ws.q8, q0, want.q8, s.nq, head);
      for (int64_t i = 0; i < s.nq; ++i) {
        const float* q = x.rows(in.x.q, s.batch, head, p.h, s.q_begin + i, p.nq);
        double dot = 0, size = 0;
        for (int64_t c = 0; c < p.d; ++c) {
          const double product = static_cast<double>(q[c]) * want.mu_k[static_cast<size_t>(c)];
          dot += product, size += std::fabs(product);
        }
        diff.expect(same(ws.logit_factor[q0 + i], x.logit_factor(want, i)), "logit_factor", head, i,
                    0);
        diff.expect(!x.paper() || !std::isfinite(dot) ||
                        near(ws.mean_logit[q0 + i], static_cast<float>(p.scale * dot),
                             static_cast<float>(p.scale * size)),
                    "mean_logit", head, i, 0);
      }
      if (head % p.group() != 0) continue;
      x.keys_equal(ws, want, t, kv);
      // Nothing reads the codes of V where O is lifted out of INT8.
      if (!p.lifted(kMatmulO)) x.transposed_equal("v8t", ws.v8t, k0, want.v8, s.nk, kv, false);
      const bool folds = spec::folds_v(p.recipe), lifted = p.lifted(kMatmulO);
      for (int64_t tile = 0; tile * x.scale_keys() < s.nk; ++tile) {
        const int64_t begin = tile * x.scale_keys(), end = std::min(begin + x.scale_keys(), s.nk);
        const auto scale = [&](int64_t j) { return want.v_scale[static_cast<size_t>(j)]; };
        bool poisoned = false;
        float unit = 1.0f;  // of a tile whose keys share a scale
        for (int64_t j = begin; j < end; ++j) {
          poisoned = poisoned || std::isnan(scale(j));
          if (!folds && !lifted && !std::isnan(scale(j))) unit = scale(j);
        }
        diff.expect((lifted && !poisoned) ||
                        same(ws.v_tile_scale[k0 / x.scale_keys() + tile], poisoned ? NAN : unit),
                    "v_tile_scale", kv, tile, 0);
        for (int64_t j = begin; j < end && ws.folded != nullptr; ++j) {
          const float folded = folds && !std::isnan(scale(j)) ? scale(j) : 1.0f;
          const cuda::sm80::FoldedScales& got = ws.folded[(k0 + j) / cuda::kBlock];
          const auto order = std::find(kPermuted.begin(), kPermuted.end(), j % 16);
          const int64_t place = (k0 + j) % cuda::kBlock / 16 * 16 + (order - kPermuted.begin());
          diff.expect(near(got.exponent[place] - got.kBias, std::log2(folded), got.kBias) &&
                          near(got.inverse[place], 1.0f / folded, 1.0f / folded),
                      "folded", kv, j, 0);
        }
        for (int64_t j = begin; j < end && poisoned && folds; ++j)
          diff.expect(same(ws.v_scale[k0 + j], scale(j)), "v_scale", kv, j, 0);
        if ((poisoned && x.paper()) || lifted)
          x.copies_equal("v16", ws.v16, k0, x.rows(in.x.v, s.batch, kv, p.hk, s.k_begin, p.nk),
                         begin, end, kv);
        else if (p.lead() != 0)
          x.copies_equal("codes in v16", ws.v16, k0, ref::as_floats(want.v8).data(), begin, end,
                         kv);
      }
    }
}

/// `aligned`: the kernel may take V and dO from the caller.
void check_backward(const DeviceCase& dc, const Workspaces& w, const CaseInputs& in,
                    const Results& out, bool aligned, Differences& diff) {
  const spec::Problem& p = w.backward.problem;
  const bool dout_as_is = aligned && p.d == 64, folds = spec::folds_v(p.recipe),
             v_as_is = aligned && !folds && (p.d == 64 || p.d == 128);
  const Inside x{p, cuda::tuned::Plan(p), in, cuda::sm80::tiles_of(p), diff};
  cuda::Arena arena(const_cast<std::byte*>(w.backward.bytes.data())),
      forward_arena(const_cast<std::byte*>(w.forward.bytes.data()));
  const cuda::sm80::BackwardSpace ws(p, x.plan, arena);
  const cuda::sm80::ForwardSpace of_forward(w.forward.problem, x.plan, forward_arena);
  for (int64_t t = 0; t < p.num_sequences(); ++t)
    for (int64_t head = 0; head < p.h; ++head) {
      const int64_t kv = head / p.group(), k0 = kv * x.plan.tk + x.k_pad(t);
      const spec::Sequence s = p.sequence(t);
      const ref::RecipeOperands operands = x.oracle(t, head, kv);
      const ref::RecipeInputs& want = operands.inputs;
      const float* dout = x.rows(in.x.dout, s.batch, head, p.h, s.q_begin, p.nq);
      const ref::TokenCodes want_do =
          ref::quantize_tokens(dout, s.nq, p.d, p.recipe.scheme == Scheme::paper ? x.tiles.q : 1);
      const int64_t q0 = head * x.plan.tq + x.q_pad(t);
      x.rows_equal("q8", ws.q8, q0, want.q8, s.nq, head);
      x.transposed_equal("q8t", ws.q8t, q0, want.q8, s.nq, head, false);
      x.transposed_equal("do8t", ws.do8t, q0, want_do.codes, s.nq, head, false);
      if (!dout_as_is) x.copies_equal("do16", ws.do16, q0, dout, 0, s.nq, head);
      for (int64_t i = 0; i < s.nq; ++i) {
        const int64_t row = (s.batch * p.h + head) * p.nq + s.q_begin + i;
        const float lse = out.lse[static_cast<size_t>(row)];
        const cuda::sm80::QueryRow got = ws.row[q0 + i];
        const float logit_factor = x.logit_factor(want, i);
        const float mean_logit = x.paper() ? of_forward.mean_logit[q0 + i] : 0.0f,
                    lse2 = lse == -INFINITY ? INFINITY : (lse - mean_logit) * numerics::kLog2e;
        diff.expect(same(got.divisor, logit_factor), "row.divisor", head, i, 0);
        diff.expect(same(got.lse2, lse2), "row.lse2", head, i, 0);
        double delta = 0, size = 0;
        for (int64_t c = 0; c < p.d; ++c) {
          const double product = static_cast<double>(dout[i * p.d + c]) *
                                 static_cast<double>(out.o[static_cast<size_t>(row * p.d + c)]);
          delta += product, size += std::fabs(product);
        }
        if (dc.dlse) delta -= in.dlse[static_cast<size_t>(row)];
        if (lse == -INFINITY) delta = 0;
        const float scale = want_do.scale[static_cast<size_t>(i)];
        const float phi = scale == 0.0f ? 0x1p-90f : scale, slope = logit_factor / phi;
        const int octaves = numerics::octaves_of(s.nk);
        for (int octave = 0; octave < (x.paper() ? 1 : octaves); ++octave) {
          const cuda::sm80::QueryExponent& exponent =
              ws.exponent[octave * p.h * x.plan.tq + q0 + i];
          const float centre = x.centre_logit(operands, i, octave);
          diff.expect(same(exponent.logit_factor, logit_factor) &&
                          near(exponent.lse2, lse2 - std::log2(phi) - centre, 1.0f),
                      "exponent", head, i, octave);
        }
        for (int octave = 0; octave < (folds ? octaves : 1); ++octave) {
          const cuda::sm80::QueryGradient gradient = ws.gradient[octave * p.h * x.plan.tq + q0 + i];
          double added = 0, of_centre = 0;  // what the centre of V adds to dP
          for (int64_t c = 0; c < p.d && folds; ++c) {
            const size_t at = static_cast<size_t>(octave * p.d + c);
            const double product =
                static_cast<double>(dout[i * p.d + c]) *
                static_cast<double>(want.v_centre_scale[static_cast<size_t>(octave)] *
                                    static_cast<float>(want.v_centre8[at]));
            added += product, of_centre += std::fabs(product);
          }
          diff.expect(same(gradient.slope, slope), "gradient.slope", head, i, octave);
          diff.expect(!std::isfinite(delta) || std::isnan(slope) ||
                          near(-gradient.offset / slope, static_cast<float>(delta - added),
                               static_cast<float>(size + of_centre)),
                      "gradient.offset", head, i, octave);
        }
      }
      if (head % p.group() != 0) continue;
      x.keys_equal(ws, want, t, kv);
      if (x.paper())
        x.transposed_equal("k8t", ws.k8t, k0, want.k8, s.nk, kv, true);
      else
        x.dq_keys_equal(ws, operands, t, kv);
      if (folds) {
        x.copies_equal("codes in v16", ws.v16, k0, ref::as_floats(want.v8).data(), 0, s.nk, kv);
        for (int64_t j = 0; j < s.nk; ++j)
          diff.expect(same(ws.v_scale[k0 + j], want.v_scale[static_cast<size_t>(j)]), "v_scale", kv,
                      j, 0);
      } else if (!v_as_is) {
        x.copies_equal("v16", ws.v16, k0, x.rows(in.x.v, s.batch, kv, p.hk, s.k_begin, p.nk), 0,
                       s.nk, kv);
      }
    }
}

void expect_equal_codes(const DeviceCase& given, const CaseInputs& in, bool aligned = true) {
  DeviceCase dc = given;
  dc.impl = "cuda-sm80";  // whose workspaces are read here
  SCOPED_TRACE(dc.c.to_string());
  Workspaces w;
  const Results out = run_on_device(dc, in, 0.0f, &w);
  Differences diff;
  check_forward(w.forward, in, diff);
  EXPECT_EQ(diff.count, 0) << "forward: first " << diff.first;
  diff = {};
  check_backward(dc, w, in, out, aligned, diff);
  EXPECT_EQ(diff.count, 0) << "backward: first " << diff.first;
}

TEST(GpuCodes, EqualTheOracles) {
  NEED_DEVICE();
  for (const char* text : {"b2 h3 n300 d64",
                           "b2 h2 n300 d128 causal",
                           "h2 n1 d64 f16",
                           "b3 h2 nq129 nk700 d128 f16",
                           "h4 hk2 nq65 nk1025 d72",
                           "h6 hk2 n257 d40 f16 lift=O",
                           "h1 n127 d8",
                           "h2 n640 d128 keep=0.5",
                           "b2 h2 n300 d64 paper",
                           "h4 hk2 nq129 nk515 d128 paper f16",
                           "h2 n200 d96 paper causal",
                           "h2 n300 d64 smooth_k=off",
                           "h2 n300 d128 f16 paper smooth_k=off",
                           "h2 n300 d64",
                           "b2 h4 hk2 nq65 nk1100 d128 causal",
                           "h2 n300 d40 f16 lift=O",
                           "h2 n300 d128 f16 smooth_k=off",
                           "h2 n300 d96 rotate=off",
                           "h2 n300 d128 rotate=off",
                           "h2 n200 d80 paper rotate=on",
                           "h2 n300 d64 lift=O"}) {
    DeviceCase dc(text);
    dc.kind = trace::InputKind::offset;  // means that matter
    expect_equal_codes(dc, make_case_inputs(dc));
  }
}

TEST(GpuCodes, EqualTheOraclesWhereverTheInputsLie) {
  NEED_DEVICE();
  for (const char* text :
       {"b2 h3 n200 d64", "b2 h4 hk2 n131 d128 f16", "b2 h2 n200 d72 paper", "b2 h2 n200 d72"}) {
    DeviceCase dc(text);
    dc.kind = trace::InputKind::offset;
    dc.placement = Placement::gaps;
    expect_equal_codes(dc, make_case_inputs(dc), false);
    dc = DeviceCase(std::string(text) + " bshd");
    expect_equal_codes(dc, make_case_inputs(dc));
  }
}

TEST(GpuCodes, EqualTheOraclesInDocuments) {
  NEED_DEVICE();
  for (const char* text : {"h2 nq1700 nk1650 d64", "h4 hk2 nq1700 nk1650 d128 f16",
                           "h2 nq1700 nk1650 d128 paper", "h4 hk2 nq1700 nk1650 d64"}) {
    DeviceCase dc(text);
    dc.kind = trace::InputKind::offset;
    dc.dlse = dc.deterministic = true;
    dc.cu_q = {0, 0, 130, 131, 131, 400, 1700};
    dc.cu_k = {0, 5, 200, 200, 207, 1500, 1650};
    expect_equal_codes(dc, make_case_inputs(dc));
  }
}

// Tokens with NaN or Inf keep out of means and of other tokens' scales; huge ones do not.
TEST(GpuCodes, EqualTheOraclesWithPoisonAndExtremes) {
  NEED_DEVICE();
  for (const char* text : {"h2 n600 d64", "h2 n600 d128", "h2 n600 d64 paper",
                           "h2 n600 d128 f16 paper", "h2 n600 d128 f16"})
    for (float value : {NAN, INFINITY, 3e38f, 0.0f}) {
      DeviceCase dc(text);
      dc.deterministic = true;
      CaseInputs in = make_case_inputs(dc);
      if (dc.c.dtype == Dtype::f16 && value == 3e38f) value = 6e4f;
      for (auto* x : {&in.x.q, &in.x.k, &in.x.v, &in.x.dout})
        for (int64_t token : {int64_t{3}, int64_t{150}, int64_t{151}, int64_t{599}})
          for (int64_t c = 0; c < (value == 0.0f ? dc.c.d : 1); ++c)
            (*x)[static_cast<size_t>(token * dc.c.d + c)] = value;
      with_dtype(dc.c.dtype, [&](auto type) {  // as the device sees it
        for (auto* x : {&in.x.q, &in.x.k, &in.x.v, &in.x.dout})
          for (float& v : *x) v = to_float(from_float<decltype(type)>(v));
      });
      expect_equal_codes(dc, in);
    }
}

}  // namespace
}  // namespace sagebwd::gpu
