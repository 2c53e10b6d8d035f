// SPDX-License-Identifier: Apache-2.0
#include "spec/linear.h"

#include "base/check.h"
#include "spec/averages.h"
#include "spec/lists.h"
#include "spec/mix.h"
#include "spec/views.h"

namespace sagebwd::spec {
namespace {

LinearProblem resolve_linear(const LinearArgs& a, Direction direction, bool check_memory) {
  LinearProblem p{};
  static_cast<Batch&>(p) = resolve_batch(a.q, a.k, a.device, direction);
  check_view("q", a.q, p.dtype, {p.b, p.h, p.nq, p.d}, false, check_memory);
  check_view("k", a.k, p.dtype, {p.b, p.hk, p.nk, p.d}, false, check_memory);
  check_view("v", a.v, p.dtype, {p.b, p.hk, p.nk, p.d}, false, check_memory);
  SAGE_CHECK(a.phi == FeatureMap::softmax,
             "phi: expected 0 (softmax), got " << static_cast<int>(a.phi));
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
void check_mixing(LinearProblem& p, const Alpha& alpha, const char* name, const TensorView& sparse,
                  bool check_memory) {
  if (alpha.data == nullptr) return;
  p.mixes = true;
  check_alpha(alpha, p.b, p.h, p.nq, check_memory);
  check_long_blocks(alpha);
  check_view(name, sparse, p.dtype, {p.b, p.h, p.nq, p.d}, false, check_memory);
}

void check_averages(LinearProblem& p, const void* averages, size_t given, bool check_memory) {
  if (averages == nullptr) return;
  p.has_averages = true;
  const int64_t bytes = AveragesLayout(p).bytes;
  SAGE_CHECK(given >= static_cast<size_t>(bytes),
             "averages: expected at least " << bytes << " bytes, got " << given);
  if (check_memory) check_pointer("averages", averages, 16, bytes);
}

}  // namespace

LinearProblem resolve(const LinearForwardArgs& a, bool check_memory) {
  LinearProblem p = resolve_linear(a, Direction::forward, check_memory);
  check_view("o", a.o, p.dtype, {p.b, p.h, p.nq, p.d}, true, check_memory);
  if (a.norm.data != nullptr) check_stats("norm", a.norm, {p.b, p.h, p.nq}, true, check_memory);
  check_mixing(p, a.alpha, "sparse", a.sparse, check_memory);
  check_averages(p, a.averages, a.averages_bytes, check_memory);
  return p;
}

LinearProblem resolve(const LinearBackwardArgs& a, bool check_memory) {
  LinearProblem p = resolve_linear(a, Direction::backward, check_memory);
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
