// SPDX-License-Identifier: Apache-2.0
#include "trace/compare_head.h"

#include "base/dispatch_dtype.h"
#include "numerics/quantize.h"
#include "ref/attention_exact.h"

namespace sagebwd::trace {
namespace {

std::vector<double> widened(const float* x, int64_t n) { return std::vector<double>(x, x + n); }

void add_rows(ErrorStats& stats, const float* value, const std::vector<double>& reference,
              int64_t cols) {
  const int64_t rows = static_cast<int64_t>(reference.size()) / cols;
  for (int64_t i = 0; i < rows; ++i) stats.add_row(value + i * cols, &reference[i * cols], cols, i);
}

/// code · scale / folded, the value that an integer matmul used. A token of zeros takes no part in
/// the sum, so it has no error either.
double undone(int16_t code, float scale, float folded, float unquantised) {
  if (folded == 0.0f) return unquantised;
  return static_cast<double>(code) * static_cast<double>(scale) / static_cast<double>(folded);
}

/// Compares one tile of the backward with the same tile of the exact run.
class TileComparison {
 public:
  TileComparison(const ref::RecipeHead& head, const std::vector<float>& mu_k,
                 const ref::ExactHead& exact_head, const ref::ExactResult& exact, HeadErrors& out)
      : head_(head), mu_k_(mu_k), exact_head_(exact_head), exact_(exact), out_(out) {}

  void operator()(const ref::RecipeTile& t) const {
    const ref::ExactTile want = ref::exact_tile(exact_head_, exact_, t.q0, t.rows, t.k0, t.cols);
    const size_t cols = static_cast<size_t>(t.cols);
    std::vector<double> s(cols), p(cols), ds(cols), ds_for_dk(cols);
    for (int64_t r = 0; r < t.rows; ++r) {
      const int64_t i = t.q0 + r;
      const ref::Span seen = head_.visible.inside(i, t.k0, t.k0 + t.cols);
      if (seen.empty()) continue;
      const int64_t begin = seen.begin - t.k0, end = seen.end - t.k0;
      const double mean = head_.softcap == 0.0f ? mean_logit(i) : 0.0;
      for (int64_t c = begin; c < end; ++c) {
        const int64_t at = r * t.cols + c;
        s[c] = static_cast<double>(t.s2[at]) * numerics::kLn2 + mean;
        p[c] = t.p8 ? undone(t.p8[at], t.p_scale[c], t.do_scale[r], t.p[at]) : t.p[at];
        ds[c] = t.ds8_query ? undone(t.ds8_query[at], t.ds_scale_query[r], t.k_fold[c], t.ds[at])
                            : t.ds[at];
        ds_for_dk[c] =
            t.ds8_key ? undone(t.ds8_key[at], t.ds_scale_key[c], t.q_scale[r], t.ds[at]) : t.ds[at];
      }
      const int64_t n = end - begin, at = r * t.cols + begin;
      out_.s.add_row(&s[begin], &want.s[at], n, i);
      out_.p.add_row(&p[begin], &want.p[at], n, i);
      out_.p_unquantised.add_row(&t.p[at], &want.p[at], n, i);
      out_.dp.add_row(&t.dp[at], &want.dp[at], n, i);
      out_.ds.add_row(&ds[begin], &want.ds[at], n, i);
      out_.ds_for_dk.add_row(&ds_for_dk[begin], &want.ds[at], n, i);
      out_.ds_unquantised.add_row(&t.ds[at], &want.ds[at], n, i);
    }
  }

 private:
  /// What K-smoothing takes out of every logit of row i.
  double mean_logit(int64_t i) const {
    double sum = 0;
    for (int64_t c = 0; c < head_.d; ++c)
      sum += static_cast<double>(head_.q[i * head_.d + c]) * mu_k_[c];
    return head_.scale * sum;
  }

  const ref::RecipeHead& head_;
  const std::vector<float>& mu_k_;
  const ref::ExactHead& exact_head_;
  const ref::ExactResult& exact_;
  HeadErrors& out_;
};

}  // namespace

const std::vector<HeadErrors::Named>& HeadErrors::names() {
  static const std::vector<Named> list = {
      {"S", &HeadErrors::s},
      {"P", &HeadErrors::p},
      {"P unquantised", &HeadErrors::p_unquantised},
      {"O", &HeadErrors::o},
      {"D", &HeadErrors::delta},
      {"dP", &HeadErrors::dp},
      {"dS", &HeadErrors::ds},
      {"dS for dK", &HeadErrors::ds_for_dk},
      {"dS unquantised", &HeadErrors::ds_unquantised},
      {"dQ", &HeadErrors::dq},
      {"dK", &HeadErrors::dk},
      {"dV", &HeadErrors::dv},
  };
  return list;
}

void HeadErrors::append(const HeadErrors& other) {
  for (const Named& n : names()) (this->*n.stats).append(other.*n.stats);
}

void HeadErrors::finish() {
  for (const Named& n : names()) (this->*n.stats).finish();
}

HeadErrors compare_head(const ref::RecipeHead& head, const float* dout, Dtype dtype,
                        const HeadOutputs& given) {
  const int64_t d = head.d, dv = head.value_dim();
  const std::vector<double> q = widened(head.q, head.nq * d), k = widened(head.k, head.nk * d);
  const std::vector<double> v = widened(head.v, head.nk * dv), dout64 = widened(dout, head.nq * dv);
  ref::ExactHead exact_head;
  exact_head.nq = head.nq, exact_head.nk = head.nk, exact_head.d = d, exact_head.dv = dv;
  exact_head.q = q.data(), exact_head.k = k.data(), exact_head.v = v.data();
  exact_head.dout = dout64.data();
  exact_head.scale = static_cast<double>(head.scale);
  exact_head.softcap = static_cast<double>(head.softcap);
  exact_head.visible = head.visible;
  const ref::ExactResult exact = ref::attention_exact(exact_head);

  ref::RecipeForward forward = ref::recipe_forward(head);
  with_dtype(dtype, [&](auto type) {
    for (float& x : forward.o) x = to_float(from_float<decltype(type)>(x));
  });
  HeadErrors out;
  const ref::RecipeBackward backward =
      ref::recipe_backward(head, {forward.o.data(), forward.lse.data(), dout, nullptr, false},
                           TileComparison(head, forward.inputs.mu_k, exact_head, exact, out));

  add_rows(out.o, given.o ? given.o : forward.o.data(), exact.o, dv);
  add_rows(out.delta, backward.delta.data(), exact.delta, 1);
  add_rows(out.dq, given.dq ? given.dq : backward.dq.data(), exact.dq, d);
  add_rows(out.dk, given.dk ? given.dk : backward.dk.data(), exact.dk, d);
  add_rows(out.dv, given.dv ? given.dv : backward.dv.data(), exact.dv, dv);
  out.finish();
  return out;
}

}  // namespace sagebwd::trace
