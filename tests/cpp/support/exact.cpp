// SPDX-License-Identifier: Apache-2.0
// The exact answer of a whole problem: every sequence and head through ref::attention_exact.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/half.h"
#include "base/parallel.h"
#include "ref/problem_visibility.h"
#include "support/attention_problem.h"

namespace sagebwd::testing {
namespace {

/// Rows of one head of one sequence, out of a contiguous [b, h, n, d] tensor.
template <typename T, typename S>
std::vector<T> rows_of(const std::vector<S>& x, int64_t heads, int64_t n, int64_t d, int64_t batch,
                       int64_t head, int64_t begin, int64_t count) {
  const auto first = x.begin() + ((batch * heads + head) * n + begin) * d;
  return std::vector<T>(first, first + count * d);
}

template <typename S>
void add_rows(std::vector<double>& to, const std::vector<S>& rows, int64_t heads, int64_t n,
              int64_t d, int64_t batch, int64_t head, int64_t begin) {
  double* at = to.data() + ((batch * heads + head) * n + begin) * d;
  for (size_t i = 0; i < rows.size(); ++i) at[i] += static_cast<double>(rows[i]);
}

/// FP64 copies of one head, and the oracle's view of them.
struct ExactInputs {
  ExactInputs(const AttentionProblem& p, const spec::Problem& r, int64_t t, int64_t h)
      : sequence(r.sequence(t)) {
    const spec::AttnCase& c = p.c;
    const spec::Sequence& s = sequence;
    q = rows_of<double>(p.in.q, c.h, c.nq, c.d, s.batch, h, s.q_begin, s.nq);
    dout = rows_of<double>(p.in.dout, c.h, c.nq, c.value_dim(), s.batch, h, s.q_begin, s.nq);
    k = rows_of<double>(p.in.k, c.hk, c.nk, c.d, s.batch, h / r.group(), s.k_begin, s.nk);
    v = rows_of<double>(p.in.v, c.hk, c.nk, c.value_dim(), s.batch, h / r.group(), s.k_begin, s.nk);
    if (!p.dlse.empty()) dlse = rows_of<double>(p.dlse, c.h, c.nq, 1, s.batch, h, s.q_begin, s.nq);
    head.nq = s.nq, head.nk = s.nk, head.d = c.d, head.dv = c.value_dim();
    head.q = q.data(), head.k = k.data(), head.v = v.data(), head.dout = dout.data();
    head.dlse = dlse.empty() ? nullptr : dlse.data();
    head.scale = static_cast<double>(r.scale), head.softcap = static_cast<double>(r.softcap);
    head.visible = ref::visibility_of(r, t, h);
  }
  ExactInputs(const ExactInputs&) = delete;

  spec::Sequence sequence;
  std::vector<double> q, k, v, dout, dlse;
  ref::ExactHead head;
};

double round_bf16(double x) {
  return static_cast<double>(to_float(from_float<bf16>(static_cast<float>(x))));
}

/// P and dS rounded on their way into the matmuls. Rows have one span of keys: no lists.
ref::ExactResult bf16_head(const ref::ExactHead& head) {
  const int64_t d = head.d, value_d = head.value_dim();
  std::vector<double> o(static_cast<size_t>(head.nq * value_d), 0.0);
  std::vector<double> dq(static_cast<size_t>(head.nq * d), 0.0);
  std::vector<double> dk(static_cast<size_t>(head.nk * d), 0.0);
  std::vector<double> dv(static_cast<size_t>(head.nk * value_d), 0.0);
  ref::ExactResult out = ref::attention_exact(head, [&](const ref::ExactRow& row) {
    double* dq_i = dq.data() + row.i * d;
    double* o_i = o.data() + row.i * value_d;
    const double *q_i = head.q + row.i * d, *dout_i = head.dout + row.i * value_d;
    // The forward rounds exp(S - max), so that the largest is one; the backward exp(S - LSE).
    const double top = *std::max_element(row.p, row.p + (row.end - row.begin));
    for (int64_t j = row.begin; j < row.end; ++j)
      for (int64_t c = 0; c < value_d; ++c)
        o_i[c] += round_bf16(row.p[j - row.begin] / top) * top * head.v[j * value_d + c];
    double delta = head.dlse != nullptr ? -head.dlse[row.i] : 0.0;  // of the O that is kept
    for (int64_t c = 0; c < value_d; ++c) {
      o_i[c] = round_bf16(o_i[c]);
      delta += dout_i[c] * o_i[c];
    }
    for (int64_t j = row.begin; j < row.end; ++j) {
      const int64_t at = j - row.begin;
      const double y = head.softcap == 0.0 ? 0.0 : row.s[at] / head.softcap, slope = 1.0 - y * y;
      const double p = round_bf16(row.p[at]),
                   ds = round_bf16(slope * row.p[at] * (row.dp[at] - delta));
      for (int64_t c = 0; c < value_d; ++c) dv[j * value_d + c] += p * dout_i[c];
      for (int64_t c = 0; c < d; ++c) {
        dq_i[c] += head.scale * ds * head.k[j * d + c];
        dk[j * d + c] += head.scale * ds * q_i[c];
      }
    }
  });
  out.o = o, out.dq = dq, out.dk = dk, out.dv = dv;
  return out;
}

Exact run_exact(const AttentionProblem& p,
                const std::function<ref::ExactResult(const ref::ExactHead&)>& attention) {
  const spec::AttnCase& c = p.c;
  const spec::Problem r = p.resolved();
  Exact out;
  out.o.assign(static_cast<size_t>(c.o_elements()), 0.0);
  out.dq.assign(static_cast<size_t>(c.q_elements()), 0.0);
  out.dk.assign(static_cast<size_t>(c.k_elements()), 0.0);
  out.dv.assign(static_cast<size_t>(c.v_elements()), 0.0);
  out.lse.assign(static_cast<size_t>(c.b * c.h * c.nq), 0.0);
  out.max_logit.assign(static_cast<size_t>(r.num_sequences() * c.h), 0.0);
  // One item per key head: its query heads add to the same dK and dV.
  parallel_for({}, r.num_sequences() * c.hk, [&](int64_t item) {
    const int64_t t = item / c.hk, hk = item % c.hk;
    for (int64_t h = hk * r.group(); h < (hk + 1) * r.group(); ++h) {
      const ExactInputs in(p, r, t, h);
      const spec::Sequence& s = in.sequence;
      const ref::ExactResult one = attention(in.head);
      add_rows(out.o, one.o, c.h, c.nq, c.value_dim(), s.batch, h, s.q_begin);
      add_rows(out.dq, one.dq, c.h, c.nq, c.d, s.batch, h, s.q_begin);
      add_rows(out.lse, one.lse, c.h, c.nq, 1, s.batch, h, s.q_begin);
      add_rows(out.dk, one.dk, c.hk, c.nk, c.d, s.batch, hk, s.k_begin);
      add_rows(out.dv, one.dv, c.hk, c.nk, c.value_dim(), s.batch, hk, s.k_begin);
      out.max_logit[t * c.h + h] = one.max_logit;
    }
  });
  return out;
}

}  // namespace

Exact exact(const AttentionProblem& p) {
  return run_exact(p, [](const ref::ExactHead& head) { return ref::attention_exact(head); });
}

Exact bf16_attention(const AttentionProblem& p) { return run_exact(p, bf16_head); }

AttentionProblem with_levels_of(const dispatch::Implementation& impl, AttentionProblem p) {
  p.levels_of_p = impl.tiles(p.resolved()).p_levels;
  return p;
}

OneHead one_head(const dispatch::Implementation& impl, const AttentionProblem& p, int64_t sequence,
                 int64_t h) {
  const spec::AttnCase& c = p.c;
  const spec::Problem r = p.resolved();
  const spec::Sequence s = r.sequence(sequence);
  OneHead one;
  one.q = rows_of<float>(p.in.q, c.h, c.nq, c.d, s.batch, h, s.q_begin, s.nq);
  one.dout = rows_of<float>(p.in.dout, c.h, c.nq, c.value_dim(), s.batch, h, s.q_begin, s.nq);
  one.k = rows_of<float>(p.in.k, c.hk, c.nk, c.d, s.batch, h / r.group(), s.k_begin, s.nk);
  one.v =
      rows_of<float>(p.in.v, c.hk, c.nk, c.value_dim(), s.batch, h / r.group(), s.k_begin, s.nk);
  if (!p.dlse.empty()) one.dlse = rows_of<float>(p.dlse, c.h, c.nq, 1, s.batch, h, s.q_begin, s.nq);
  ref::RecipeHead& head = one.head;
  head.nq = s.nq, head.nk = s.nk, head.d = c.d, head.dv = c.value_dim();
  head.q = one.q.data(), head.k = one.k.data(), head.v = one.v.data();
  head.scale = r.scale, head.softcap = r.softcap;
  head.visible = ref::visibility_of(r, sequence, h);
  head.recipe = r.recipe;
  const backend::Tiles tiles = impl.tiles(r);
  head.recipe.tile_q = tiles.q, head.recipe.tile_k = tiles.k;
  head.lead = r.lead(), head.levels_of_p = tiles.p_levels;
  head.sequence = sequence, head.head = h;
  return one;
}

}  // namespace sagebwd::testing
