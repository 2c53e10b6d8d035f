// SPDX-License-Identifier: Apache-2.0
#include "spec/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "base/check.h"
#include "spec/averages.h"
#include "spec/codes.h"
#include "spec/lists.h"
#include "spec/mix.h"
#include "spec/views.h"

namespace sagebwd::spec {
namespace {

/// Caps for which a kernel can compute x/cap and e^(-2|x|/cap) in FP32 without a thought.
constexpr float kLeastSoftcap = 0x1p-64f, kMostSoftcap = 0x1p64f;

/// No address space holds more elements, and products of sizes stay far from overflow below it.
constexpr int64_t kMostElements = int64_t{1} << 47;

void check_offsets(const char* name, const int32_t* cu, int64_t count, int64_t total) {
  SAGE_CHECK(cu != nullptr, name << ": expected " << count + 1 << " offsets, got null");
  check_pointer(name, cu, alignof(int32_t));
  SAGE_CHECK(cu[0] == 0, name << ": expected to start at 0, got " << cu[0]);
  for (int64_t t = 0; t < count; ++t)
    SAGE_CHECK(cu[t + 1] >= cu[t], name << ": expected non-decreasing offsets, got " << cu[t]
                                        << " then " << cu[t + 1] << " at document " << t);
  SAGE_CHECK(cu[count] == total,
             name << ": expected to end at the packed length " << total << ", got " << cu[count]);
}

void check_recipe(const Recipe& r) {
  SAGE_CHECK(
      r.scheme == Scheme::paper || r.scheme == Scheme::vectorwise,
      "recipe.scheme: expected 0 (paper) or 1 (vectorwise), got " << static_cast<int>(r.scheme));
  SAGE_CHECK(
      r.rounding == Rounding::nearest || r.rounding == Rounding::dither,
      "recipe.rounding: expected 0 (nearest) or 1 (dither), got " << static_cast<int>(r.rounding));
  SAGE_CHECK((r.dithered & ~kMatmulDitherable) == 0,
             "recipe.dithered: expected bits of O, dV, dQ and dK (0x6a), got 0x" << std::hex
                                                                                 << r.dithered);
  for (int tile : {r.tile_q, r.tile_k})
    SAGE_CHECK(tile == 0 || (tile > 0 && tile % 64 == 0 && tile <= 256),
               "recipe tile: expected 0 or a multiple of 64 up to 256, got " << tile);
  SAGE_CHECK(r.p_levels == 0 || r.p_levels == 127 || r.p_levels == 255,
             "recipe.p_levels: expected 127, 255 or 0 (the backend's choice), got " << r.p_levels);
  SAGE_CHECK(r.pv16_tiles >= -1,
             "recipe.pv16_tiles: expected -1 (all) or more, got " << r.pv16_tiles);
  SAGE_CHECK((r.high_precision & ~static_cast<uint32_t>(kMatmulAll)) == 0,
             "recipe.high_precision: expected bits of the seven matmuls (0x7f), got 0x"
                 << std::hex << r.high_precision);
}

void check_codes(const AttentionArgs& a, const Problem& p, bool check_memory) {
  if (a.codes == nullptr) return;
  check_codes_recipe(p.recipe);
  const int64_t bytes = codes_layout(p).bytes;
  if (!check_memory) return;
  SAGE_CHECK(a.codes_bytes >= static_cast<size_t>(bytes),
             "codes: expected at least " << bytes << " bytes, got " << a.codes_bytes);
  check_pointer("codes", a.codes, 16, bytes);
}

/// Without lists nobody has looked at their other fields. The linear branch still cuts its tokens
/// into blocks, and takes the usual ones.
void forget_unused_lists(Problem& p) {
  if (!p.has_lists()) p.blocks = {};
}

void check_head_dim(const char* name, int64_t d) {
  SAGE_CHECK(d >= 8 && d <= 256 && d % 8 == 0,
             name << ": expected a multiple of 8 from 8 to 256, got " << d);
}

/// Sizes, dtype and device; `Args` has q, k, v and a device. V has the head dim of q and k, unless
/// the caller says otherwise.
template <typename Args>
Problem resolve_sizes(const Args& a, Direction direction) {
  const auto& qs = a.q.shape;
  const auto& ks = a.k.shape;
  SAGE_CHECK(a.device == Device::cpu || a.device == Device::cuda,
             "device: expected 0 (cpu) or 1 (cuda), got " << static_cast<int>(a.device));
  SAGE_CHECK(a.q.dtype == Dtype::f32 || a.q.dtype == Dtype::bf16 || a.q.dtype == Dtype::f16,
             "q: expected dtype f32, bf16 or f16, got code " << static_cast<int>(a.q.dtype));
  for (size_t i = 0; i < 4; ++i)
    SAGE_CHECK(qs[i] >= 0 && ks[i] >= 0,
               "q, k: expected non-negative sizes, got q " << show(qs) << " k " << show(ks));
  for (const auto& shape : {qs, ks}) {
    int64_t elements = 1;
    for (int64_t n : shape)
      SAGE_CHECK(!__builtin_mul_overflow(elements, std::max<int64_t>(n, 1), &elements) &&
                     elements <= kMostElements,
                 "q, k: expected at most 2^47 elements, got shape " << show(shape));
  }
  Problem p{};
  p.direction = direction;
  p.device = a.device;
  p.dtype = a.q.dtype;
  p.b = qs[0], p.h = qs[1], p.nq = qs[2], p.d = qs[3];
  p.hk = ks[1], p.nk = ks[2], p.dv = p.d;
  check_head_dim("head dim", p.d);
  SAGE_CHECK((p.hk > 0 && p.h % p.hk == 0) || p.h == 0,
             "heads: expected q heads to be a multiple of k heads, got " << p.h << " and " << p.hk);
  return p;
}

Problem resolve_shared(const AttentionArgs& a, Direction direction, bool check_memory) {
  Problem p = resolve_sizes(a, direction);
  p.dv = a.v.shape[3];
  check_head_dim("head dim of v", p.dv);
  p.has_codes = a.codes != nullptr;
  const auto check_input = [&](const char* name, const TensorView& t,
                               std::array<int64_t, 4> shape) {
    if (direction == Direction::backward && p.has_codes)
      check_shape(name, t, p.dtype, shape);
    else
      check_view(name, t, p.dtype, shape, false, check_memory);
  };
  check_input("q", a.q, {p.b, p.h, p.nq, p.d});
  check_input("k", a.k, {p.b, p.hk, p.nk, p.d});
  check_input("v", a.v, {p.b, p.hk, p.nk, p.dv});
  check_view("o", a.o, p.dtype, {p.b, p.h, p.nq, p.dv}, direction == Direction::forward,
             check_memory);
  check_stats("lse", a.lse, {p.b, p.h, p.nq}, direction == Direction::forward, check_memory);

  SAGE_CHECK(std::isfinite(a.scale), "scale: expected a finite number, got " << a.scale);
  p.scale =
      a.scale == 0.0f ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.d))) : a.scale;

  SAGE_CHECK(a.softcap == 0.0f || (a.softcap >= kLeastSoftcap && a.softcap <= kMostSoftcap),
             "softcap: expected 0 (off) or a number from 2^-64 to 2^64, got " << a.softcap);
  p.softcap = a.softcap;

  SAGE_CHECK(a.mask.align == Align::bottom_right || a.mask.align == Align::top_left,
             "mask.align: expected 0 (bottom_right) or 1 (top_left), got "
                 << static_cast<int>(a.mask.align));
  SAGE_CHECK(a.mask.window_left >= -1 && a.mask.window_right >= -1,
             "mask window: expected -1 (open) or more, got (" << a.mask.window_left << ", "
                                                              << a.mask.window_right << ")");
  p.align = a.mask.align;
  // A window of "everything" may come as the largest integer: capped, positions can be added to it.
  p.left = std::min(a.mask.window_left, kMostElements);
  p.right = a.mask.causal ? 0 : std::min(a.mask.window_right, kMostElements);

  SAGE_CHECK(a.documents.count >= 0 && a.documents.count < int64_t{1} << 31,
             "documents.count: expected 0 to 2^31 - 1, got " << a.documents.count);
  if (a.documents.count > 0) {
    SAGE_CHECK(p.b == 1, "packed batch: expected q, k, v with batch size 1, got " << p.b);
    if (a.documents.on_device) {
      SAGE_CHECK(a.device == Device::cuda, "documents.on_device: expected a CUDA call");
      if (check_memory) {
        check_pointer("documents.cu_q", a.documents.cu_q, alignof(int32_t));
        check_pointer("documents.cu_k", a.documents.cu_k, alignof(int32_t));
      }
    } else {
      check_offsets("documents.cu_q", a.documents.cu_q, a.documents.count, p.nq);
      check_offsets("documents.cu_k", a.documents.cu_k, a.documents.count, p.nk);
    }
  }
  p.documents = a.documents;

  check_recipe(a.recipe);
  p.recipe = a.recipe;
  p.blocks = a.blocks;
  check_lists(p, check_memory);
  forget_unused_lists(p);
  if (p.has_lists()) p.recipe.pv16_tiles = p.blocks.lead;
  check_codes(a, p, check_memory);
  return p;
}

Problem resolve_linear(const LinearArgs& a, Direction direction, bool check_memory) {
  Problem p = resolve_sizes(a, direction);
  check_view("q", a.q, p.dtype, {p.b, p.h, p.nq, p.d}, false, check_memory);
  check_view("k", a.k, p.dtype, {p.b, p.hk, p.nk, p.d}, false, check_memory);
  check_view("v", a.v, p.dtype, {p.b, p.hk, p.nk, p.d}, false, check_memory);
  SAGE_CHECK(a.phi == FeatureMap::softmax,
             "phi: expected 0 (softmax), got " << static_cast<int>(a.phi));
  p.left = p.right = -1;
  p.blocks = a.excluded;
  p.blocks.lead = 0;
  check_lists(p, check_memory, "excluded");
  forget_unused_lists(p);
  SAGE_CHECK((a.k_mean == nullptr) == (a.v_mean == nullptr),
             "k_mean, v_mean: expected both or neither");
  p.has_means = a.k_mean != nullptr;
  if (p.has_means && check_memory) {
    const int64_t bytes = p.b * p.hk * p.d * static_cast<int64_t>(sizeof(float));
    check_pointer("k_mean", a.k_mean, 16, bytes);
    check_pointer("v_mean", a.v_mean, 16, bytes);
  }
  return p;
}

/// What a linear branch that mixes has in either direction.
void check_mixing(Problem& p, const Alpha& alpha, const char* name, const TensorView& sparse,
                  bool check_memory) {
  if (alpha.data == nullptr) return;
  p.mixes = true;
  check_alpha(alpha, p.b, p.h, p.nq, check_memory);
  check_long_blocks(alpha);
  check_view(name, sparse, p.dtype, {p.b, p.h, p.nq, p.d}, false, check_memory);
}

void check_averages(Problem& p, const void* averages, size_t given, bool check_memory) {
  if (averages == nullptr) return;
  p.has_averages = true;
  const int64_t bytes = AveragesLayout(p).bytes;
  SAGE_CHECK(given >= static_cast<size_t>(bytes),
             "averages: expected at least " << bytes << " bytes, got " << given);
  if (check_memory) check_pointer("averages", averages, 16, bytes);
}

}  // namespace

void check_codes_recipe(const Recipe& r) {
  const std::string refusal = codes_refusal(r);
  SAGE_CHECK(refusal.empty(),
             "codes: expected a recipe whose codes replace q, k and v: " << refusal);
}

Problem resolve(const ForwardArgs& a, bool check_memory) {
  const Problem p = resolve_shared(a, Direction::forward, check_memory);
  if (check_memory && a.max_logit != nullptr)
    check_pointer("max_logit", a.max_logit, alignof(float),
                  p.num_sequences() * p.h * static_cast<int64_t>(sizeof(float)));
  return p;
}

Problem resolve(const BackwardArgs& a, bool check_memory) {
  Problem p = resolve_shared(a, Direction::backward, check_memory);
  check_view("dout", a.dout, p.dtype, {p.b, p.h, p.nq, p.dv}, false, check_memory);
  check_view("dq", a.dq, p.dtype, {p.b, p.h, p.nq, p.d}, true, check_memory);
  check_view("dk", a.dk, p.dtype, {p.b, p.hk, p.nk, p.d}, true, check_memory);
  check_view("dv", a.dv, p.dtype, {p.b, p.hk, p.nk, p.dv}, true, check_memory);
  if (a.dlse.data != nullptr) check_stats("dlse", a.dlse, {p.b, p.h, p.nq}, false, check_memory);
  p.has_dlse = a.dlse.data != nullptr;
  p.partial_kv = a.partial_kv;
  p.deterministic = a.deterministic;
  return p;
}

Problem resolve(const LinearForwardArgs& a, bool check_memory) {
  Problem p = resolve_linear(a, Direction::forward, check_memory);
  check_view("o", a.o, p.dtype, {p.b, p.h, p.nq, p.d}, true, check_memory);
  if (a.norm.data != nullptr) check_stats("norm", a.norm, {p.b, p.h, p.nq}, true, check_memory);
  check_mixing(p, a.alpha, "sparse", a.sparse, check_memory);
  check_averages(p, a.averages, a.averages_bytes, check_memory);
  return p;
}

Problem resolve(const LinearBackwardArgs& a, bool check_memory) {
  Problem p = resolve_linear(a, Direction::backward, check_memory);
  p.has_dnorm = a.dnorm.data != nullptr;
  check_view("dout", a.dout, p.dtype, {p.b, p.h, p.nq, p.d}, false, check_memory);
  check_view("dq", a.dq, p.dtype, {p.b, p.h, p.nq, p.d}, true, check_memory);
  check_view("dk", a.dk, p.dtype, {p.b, p.hk, p.nk, p.d}, true, check_memory);
  check_view("dv", a.dv, p.dtype, {p.b, p.hk, p.nk, p.d}, true, check_memory);
  if (p.has_dnorm) check_stats("dnorm", a.dnorm, {p.b, p.h, p.nq}, false, check_memory);
  check_mixing(p, a.alpha, "dq_sparse", a.dq_sparse, check_memory);
  check_averages(p, a.averages, a.averages_bytes, check_memory);
  if (!p.mixes) {
    SAGE_CHECK(a.dalpha == nullptr, "dalpha: expected alpha beside it");
    return p;
  }
  SAGE_CHECK(!p.has_dnorm, "dnorm: expected none beside alpha");
  check_view("dk_sparse", a.dk_sparse, p.dtype, {p.b, p.hk, p.nk, p.d}, false, check_memory);
  check_view("dv_sparse", a.dv_sparse, p.dtype, {p.b, p.hk, p.nk, p.d}, false, check_memory);
  p.has_dalpha = a.dalpha != nullptr;
  if (!p.has_dalpha || !check_memory || p.b * p.h * p.nq == 0) return p;
  constexpr int64_t kSize = sizeof(float);
  check_pointer("alpha_parts", a.alpha_parts, alignof(float),
                p.b * p.h * ceil_div(p.nq, kMixPiece) * kSize);
  check_pointer("dalpha", a.dalpha, alignof(float), a.alpha.batches * p.h * a.alpha.rows * kSize);
  return p;
}

}  // namespace sagebwd::spec
