// SPDX-License-Identifier: Apache-2.0
#include "spec/mix.h"

#include "base/check.h"
#include "spec/views.h"

namespace sagebwd::spec {
namespace {

using Shape = std::array<int64_t, 4>;

constexpr int64_t kMostBlock = int64_t{1} << 30;  // tokens

void check_sizes(const char* name, const TensorView& t, Device device) {
  constexpr int64_t kMost = int64_t{1} << 30;        // of each dimension
  constexpr int64_t kMostPieces = int64_t{1} << 27;  // of all heads
  SAGE_CHECK(device == Device::cpu || device == Device::cuda,
             "device: expected 0 (cpu) or 1 (cuda), got " << static_cast<int>(device));
  SAGE_CHECK(t.dtype == Dtype::f32 || t.dtype == Dtype::bf16 || t.dtype == Dtype::f16,
             name << ": expected dtype f32, bf16 or f16, got " << static_cast<int>(t.dtype));
  for (int64_t size : t.shape)
    SAGE_CHECK(size >= 0 && size <= kMost,
               name << ": expected sizes from 0 to 2^30, got shape " << show(t.shape));
  SAGE_CHECK(t.shape[3] >= 8 && t.shape[3] <= 256 && t.shape[3] % 8 == 0,
             name << ": expected a head dim that is a multiple of 8 up to 256, got " << t.shape[3]);
  SAGE_CHECK(t.shape[0] * t.shape[1] <= kMost &&
                 t.shape[0] * t.shape[1] * ceil_div(t.shape[2], kMixPiece) <= kMostPieces,
             name << ": expected up to 2^27 pieces of " << kMixPiece << " tokens, got shape "
                  << show(t.shape));
}

/// Of MixArgs and MixSparseArgs.
template <typename Args>
MixProblem resolve_mix(const Args& a, bool check_memory) {
  check_sizes("sparse", a.sparse, a.device);
  const Shape& s = a.sparse.shape;
  const MixProblem p{s[0], s[1], s[2], s[3]};
  check_view("sparse", a.sparse, a.sparse.dtype, s, false, check_memory);
  check_alpha(a.alpha, p.b, p.h, p.n, check_memory);
  if (a.norm.data != nullptr && !p.empty())
    check_stats("norm", a.norm, {p.b, p.h, p.n}, false, check_memory);
  return p;
}
MixProblem resolve_both(const MixArgs& a, bool check_memory) {
  const MixProblem p = resolve_mix(a, check_memory);
  check_view("linear", a.linear, a.sparse.dtype, a.sparse.shape, false, check_memory);
  return p;
}

int64_t blocks_of(const char* name, int64_t tokens, int64_t block) {
  SAGE_CHECK(block > 0 && block % kMixPiece == 0 && block <= kMostBlock,
             name << ": expected a multiple of 64 up to 2^30, got " << block);
  return ceil_div(tokens, block);
}

}  // namespace

void check_alpha(const Alpha& alpha, int64_t b, int64_t h, int64_t n, bool check_memory) {
  SAGE_CHECK(alpha.block == 1 ||
                 (alpha.block > 0 && alpha.block % kMixPiece == 0 && alpha.block <= kMostBlock),
             "alpha.block: expected 1 or a multiple of 64 up to 2^30, got " << alpha.block);
  SAGE_CHECK(alpha.batches == 1 || alpha.batches == b,
             "alpha.batches: expected 1 or " << b << ", got " << alpha.batches);
  SAGE_CHECK(alpha.rows == ceil_div(n, alpha.block),
             "alpha.rows: expected " << ceil_div(n, alpha.block) << ", one for every "
                                     << alpha.block << " of " << n << " queries, got "
                                     << alpha.rows);
  if (check_memory && b > 0 && h > 0 && n > 0)
    check_pointer("alpha", alpha.data, alignof(float),
                  alpha.batches * h * alpha.rows * static_cast<int64_t>(sizeof(float)));
}

void check_long_blocks(const Alpha& alpha) {
  SAGE_CHECK(alpha.block % kMixPiece == 0,
             "alpha.block: expected a multiple of 64, got " << alpha.block);
}

MixProblem resolve(const MixForwardArgs& a) {
  const MixProblem p = resolve_both(a, true);
  check_view("out", a.out, a.sparse.dtype, a.sparse.shape, true, true);
  return p;
}

MixProblem resolve(const MixBackwardArgs& a, bool check_memory) {
  const MixProblem p = resolve_both(a, check_memory);
  const Dtype dtype = a.sparse.dtype;
  check_view("dout", a.dout, dtype, a.sparse.shape, false, check_memory);
  check_view("dsparse", a.dsparse, dtype, a.sparse.shape, true, check_memory);
  check_view("dlinear", a.dlinear, dtype, a.sparse.shape, true, check_memory);
  return p;
}

MixProblem resolve(const MixSparseArgs& a) {
  const MixProblem p = resolve_mix(a, true);
  check_long_blocks(a.alpha);
  check_view("dout", a.dout, a.sparse.dtype, a.sparse.shape, false, true);
  check_view("dsparse", a.dsparse, a.sparse.dtype, a.sparse.shape, true, true);
  if (p.empty()) return p;
  if (a.parts != nullptr)
    check_pointer("parts", a.parts, alignof(float),
                  p.b * p.h * p.pieces() * static_cast<int64_t>(sizeof(float)));
  return p;
}

MeansProblem resolve(const BlockMeansArgs& a, bool check_memory) {
  check_sizes("q", a.q, a.device);
  check_sizes("k", a.k, a.device);
  const Shape &q = a.q.shape, &k = a.k.shape;
  SAGE_CHECK(q[0] == k[0] && q[3] == k[3],
             "q, k: expected one batch size and head dim, got " << show(q) << " and " << show(k));
  check_view("q", a.q, a.q.dtype, q, false, check_memory);
  check_view("k", a.k, a.q.dtype, k, false, check_memory);
  const MeansProblem p{.b = q[0],
                       .h = q[1],
                       .hk = k[1],
                       .nq = q[2],
                       .nk = k[2],
                       .d = q[3],
                       .q_blocks = blocks_of("block_q", q[2], a.block_q),
                       .k_blocks = blocks_of("block_k", k[2], a.block_k)};
  if (!check_memory) return p;
  if (p.b * p.h * p.nq > 0) check_pointer("q_means", a.q_means, alignof(float));
  if (p.b * p.hk * p.nk > 0) check_pointer("k_means", a.k_means, alignof(float));
  return p;
}

void check(const TopKArgs& a) {
  SAGE_CHECK(a.rows >= 0 && a.rows < int64_t{1} << 31,
             "rows: expected a number below 2^31, got " << a.rows);
  SAGE_CHECK(a.columns >= 0 && a.columns < int64_t{1} << 31,
             "columns: expected a number below 2^31, got " << a.columns);
  SAGE_CHECK(a.k >= 0 && a.k <= a.columns,
             "k: expected 0 to " << a.columns << " columns, got " << a.k);
  SAGE_CHECK(a.device == Device::cpu || a.device == Device::cuda,
             "device: expected 0 (cpu) or 1 (cuda), got " << static_cast<int>(a.device));
  if (a.device == Device::cuda && a.columns > kMostTopKColumns)
    SAGE_THROW(ErrorKind::unsupported,
               "columns: expected up to " << kMostTopKColumns << " on a GPU, got " << a.columns);
  if (a.rows == 0) return;
  check_pointer("count", a.count, alignof(int32_t));
  if (a.k > 0) check_pointer("index", a.index, alignof(int32_t));
  if (a.columns > 0) check_pointer("scores", a.scores, alignof(float));
}

}  // namespace sagebwd::spec
