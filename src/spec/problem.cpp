// SPDX-License-Identifier: Apache-2.0
#include "spec/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "base/check.h"
#include "spec/codes.h"
#include "spec/lists.h"
#include "spec/recipe_fields.h"
#include "spec/views.h"

namespace sagebwd::spec {
namespace {

/// Caps for which a kernel can compute x/cap and e^(-2|x|/cap) in FP32 without a thought.
constexpr float kLeastSoftcap = 0x1p-64f, kMostSoftcap = 0x1p64f;

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

void check_codes(const AttentionArgs& a, const Problem& p, bool check_memory) {
  if (a.codes == nullptr) return;
  check_codes_recipe(p.recipe);
  const int64_t bytes = codes_layout(p).bytes;
  if (!check_memory) return;
  SAGE_CHECK(a.codes_bytes >= static_cast<size_t>(bytes),
             "codes: expected at least " << bytes << " bytes, got " << a.codes_bytes);
  check_pointer("codes", a.codes, 16, bytes);
}

Problem resolve_shared(const AttentionArgs& a, Direction direction, bool check_memory) {
  Problem p{};
  static_cast<Batch&>(p) = resolve_batch(a.q, a.k, a.device, direction);
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
  check_lists(p, check_memory, "blocks", {a.recipe.tile_q, a.recipe.tile_k});
  forget_unused_lists(p);
  check_codes(a, p, check_memory);
  return p;
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

}  // namespace sagebwd::spec
