// SPDX-License-Identifier: Apache-2.0
#include "ref/attention_exact.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sagebwd::ref {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Queries are taken in small blocks, so that one pass over K or V serves several rows.
constexpr int64_t kBlock = 8;

std::vector<double> transposed(const double* x, int64_t rows, int64_t cols) {
  std::vector<double> t(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) t[c * rows + r] = x[r * cols + c];
  return t;
}

/// to[j] += Σ_t a[t]·b[t, j] for j < n; four terms at a time spare loads and stores of `to`.
void add_products(int64_t terms, const double* a, const double* b, int64_t ldb, int64_t n,
                  double* to) {
  int64_t t = 0;
  for (; t + 4 <= terms; t += 4) {
    const double *b0 = b + t * ldb, *b1 = b0 + ldb, *b2 = b1 + ldb, *b3 = b2 + ldb;
    for (int64_t j = 0; j < n; ++j)
      to[j] += (a[t] * b0[j] + a[t + 1] * b1[j]) + (a[t + 2] * b2[j] + a[t + 3] * b3[j]);
  }
  for (; t < terms; ++t)
    for (int64_t j = 0; j < n; ++j) to[j] += a[t] * b[t * ldb + j];
}

/// One block of query rows and its stripes of the score matrices.
class Block {
 public:
  Block(const ExactHead& head, int64_t first, std::vector<double>& memory)
      : head_(head), first_(first), rows_(std::min(kBlock, head.nq - first)) {
    const int64_t stripe = kBlock * head.nk;
    memory.resize(static_cast<size_t>(4 * stripe));
    s = memory.data(), p = s + stripe, dp = p + stripe, ds = dp + stripe;
    for (int64_t r = 0; r < rows_; ++r) seen[r] = head.visible.spans(first + r, head.nk);
  }

  int64_t rows() const { return rows_; }
  double* row(double* stripe, int64_t r) const { return stripe + r * head_.nk; }

  /// out[r, j] = factor · Σ_c x[r, c]·yt[c, j] over the visible keys j, yt being [d, nk].
  void scores(double factor, int64_t d, const double* x, const double* yt, double* out) const {
    for_key_blocks([&](int64_t r, int64_t begin, int64_t end) {
      double* to = row(out, r);
      std::fill(to + begin, to + end, 0.0);
      add_products(d, x + (first_ + r) * d, yt + begin, head_.nk, end - begin, to + begin);
      for (int64_t j = begin; j < end; ++j) to[j] *= factor;
    });
  }

  /// out[r, :] += Σ_j w[r, j]·y[j, :] over the visible keys, y being [nk, d].
  void gather(int64_t d, const double* w, const double* y, double* out) const {
    for_key_blocks([&](int64_t r, int64_t begin, int64_t end) {
      add_products(end - begin, w + r * head_.nk + begin, y + begin * d, d, d,
                   out + (first_ + r) * d);
    });
  }

  /// out[j, :] += w[r, j]·x[r, :] for the visible keys, out being [nk, d].
  void scatter(int64_t d, const double* w, const double* x, double* out) const {
    for_key_blocks([&](int64_t r, int64_t begin, int64_t end) {
      const double* from = x + (first_ + r) * d;
      for (int64_t j = begin; j < end; ++j)
        for (int64_t c = 0; c < d; ++c) out[j * d + c] += w[r * head_.nk + j] * from[c];
    });
  }

  std::vector<Span> seen[kBlock];  // by each row
  double *s, *p, *dp, *ds;         // [kBlock, nk]

 private:
  /// f(r, begin, end) for each row's visible part of each block of keys; the block stays in cache
  /// for all rows.
  template <typename F>
  void for_key_blocks(F f) const {
    constexpr int64_t kKeys = 32;
    for (int64_t j0 = 0; j0 < head_.nk; j0 += kKeys) {
      for (int64_t r = 0; r < rows_; ++r)
        for (const Span& span : seen[r]) {
          const int64_t begin = std::max(j0, span.begin);
          const int64_t end = std::min(j0 + kKeys, span.end);
          if (begin < end) f(r, begin, end);
        }
    }
  }

  const ExactHead& head_;
  int64_t first_, rows_;
};

/// f(j) for every key j of the spans.
template <typename F>
void for_keys(const std::vector<Span>& spans, F f) {
  for (const Span& span : spans)
    for (int64_t j = span.begin; j < span.end; ++j) f(j);
}

/// Caps a logit and returns the derivative of that; without a cap that is 1.
double cap(double softcap, double& logit) {
  if (softcap == 0.0) return 1.0;
  const double x = logit / softcap;
  logit = softcap * std::tanh(x);
  return 1.0 / (std::cosh(x) * std::cosh(x));
}

/// Softmax of one row in two passes: the largest logit, then the sum. Returns lse.
double softmax(const double* s, double* p, const std::vector<Span>& seen, double& max_logit) {
  double top = -kInf;
  for_keys(seen, [&](int64_t j) {
    top = std::max(top, s[j]);
    // max drops a NaN on its right, and the result must keep it.
    if (std::isnan(s[j]) || max_logit < s[j]) max_logit = s[j];
  });
  double sum = 0;
  for_keys(seen, [&](int64_t j) { sum += p[j] = std::exp(s[j] - top); });
  for_keys(seen, [&](int64_t j) { p[j] /= sum; });
  return top + std::log(sum);
}

}  // namespace

ExactResult attention_exact(const ExactHead& head,
                            const std::function<void(const ExactRow&)>& tap) {
  const int64_t d = head.d, dv = head.value_dim();
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  const bool backward = head.dout != nullptr;

  ExactResult out;
  out.max_logit = -kInf;
  out.o.assign(size(head.nq * dv), 0.0);
  out.lse.assign(size(head.nq), -kInf);
  if (backward) {
    out.delta.assign(size(head.nq), 0.0);
    out.dq.assign(size(head.nq * d), 0.0);
    out.dk.assign(size(head.nk * d), 0.0);
    out.dv.assign(size(head.nk * dv), 0.0);
  }

  const std::vector<double> kt = transposed(head.k, head.nk, d);
  const std::vector<double> vt = transposed(head.v, head.nk, backward ? dv : 0);
  std::vector<double> memory;
  for (int64_t first = 0; first < head.nq; first += kBlock) {
    const Block b(head, first, memory);
    b.scores(head.scale, d, head.q, kt.data(), b.s);
    // dS holds the derivatives of the cap until there is a dS.
    for (int64_t r = 0; r < b.rows(); ++r)
      for_keys(b.seen[r],
               [&](int64_t j) { b.row(b.ds, r)[j] = cap(head.softcap, b.row(b.s, r)[j]); });
    for (int64_t r = 0; r < b.rows(); ++r)
      if (!b.seen[r].empty())
        out.lse[first + r] = softmax(b.row(b.s, r), b.row(b.p, r), b.seen[r], out.max_logit);
    b.gather(dv, b.p, head.v, out.o.data());

    if (backward) {
      b.scores(1.0, dv, head.dout, vt.data(), b.dp);
      for (int64_t r = 0; r < b.rows(); ++r) {
        const int64_t i = first + r;
        if (b.seen[r].empty()) continue;
        double delta = head.dlse != nullptr ? -head.dlse[i] : 0.0;
        for (int64_t c = 0; c < dv; ++c) delta += head.dout[i * dv + c] * out.o[i * dv + c];
        out.delta[i] = delta;
        const double *p = b.row(b.p, r), *dp = b.row(b.dp, r);
        double* ds = b.row(b.ds, r);
        for_keys(b.seen[r], [&](int64_t j) { ds[j] *= p[j] * (dp[j] - delta); });
      }
      b.gather(d, b.ds, head.k, out.dq.data());
      b.scatter(d, b.ds, head.q, out.dk.data());
      b.scatter(dv, b.p, head.dout, out.dv.data());
    }

    if (!tap) continue;
    for (int64_t r = 0; r < b.rows(); ++r)
      for (const Span& at : b.seen[r])
        tap({first + r, at.begin, at.end, b.row(b.s, r) + at.begin, b.row(b.p, r) + at.begin,
             backward ? b.row(b.dp, r) + at.begin : nullptr,
             backward ? b.row(b.ds, r) + at.begin : nullptr});
  }
  for (double& x : out.dq) x *= head.scale;
  for (double& x : out.dk) x *= head.scale;
  return out;
}

ExactTile exact_tile(const ExactHead& head, const ExactResult& result, int64_t q0, int64_t rows,
                     int64_t k0, int64_t cols) {
  const int64_t d = head.d, dv = head.value_dim();
  const auto kt = transposed(head.k + k0 * d, cols, d), vt = transposed(head.v + k0 * dv, cols, dv);
  const std::vector<double> zeros(static_cast<size_t>(rows * cols), 0.0);
  ExactTile t{zeros, zeros, zeros, zeros};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t i = q0 + r;
    add_products(d, head.q + i * d, kt.data(), cols, cols, &t.s[r * cols]);
    add_products(dv, head.dout + i * dv, vt.data(), cols, cols, &t.dp[r * cols]);
    for (int64_t at = r * cols; at < (r + 1) * cols; ++at) {
      t.s[at] *= head.scale;
      const double slope = cap(head.softcap, t.s[at]);
      t.p[at] = std::exp(t.s[at] - result.lse[i]);
      t.ds[at] = slope * (t.p[at] * (t.dp[at] - result.delta[i]));
    }
  }
  return t;
}

}  // namespace sagebwd::ref
