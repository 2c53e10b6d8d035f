// SPDX-License-Identifier: Apache-2.0
#include "ref/linear_exact.h"

#include <algorithm>
#include <cmath>

namespace sagebwd::ref {
namespace {

using Values = std::vector<double>;

Values zeros(int64_t n) { return Values(static_cast<size_t>(n), 0.0); }

Values mean_of(const double* x, int64_t rows, int64_t d) {
  Values mean = zeros(d);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < d; ++c) mean[c] += x[r * d + c] / static_cast<double>(rows);
  return mean;
}

/// φ of every row of x − shift.
Values features(const double* x, const Values& shift, int64_t rows, int64_t d) {
  Values phi = zeros(rows * d);
  for (int64_t r = 0; r < rows; ++r) {
    double* y = &phi[r * d];
    for (int64_t c = 0; c < d; ++c) y[c] = x[r * d + c] - shift[c];
    const double top = *std::max_element(y, y + d);
    double sum = 0;
    for (int64_t c = 0; c < d; ++c) sum += y[c] = std::exp(y[c] - top);
    for (int64_t c = 0; c < d; ++c) y[c] /= sum;
  }
  return phi;
}

/// dphi becomes dx.
void back_through_features(const Values& phi, Values& dphi, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r) {
    double dot = 0;
    for (int64_t c = 0; c < d; ++c) dot += phi[r * d + c] * dphi[r * d + c];
    for (int64_t c = 0; c < d; ++c) dphi[r * d + c] = phi[r * d + c] * (dphi[r * d + c] - dot);
  }
}

/// H and Z of a block, or h and z, or their gradients.
struct State {
  explicit State(int64_t d) : h(zeros(d * d)), z(zeros(d)) {}
  void add(const State& other) {
    for (size_t n = 0; n < h.size(); ++n) h[n] += other.h[n];
    for (size_t n = 0; n < z.size(); ++n) z[n] += other.z[n];
  }
  Values h, z;  // [d of φ, d of V], [d]
};

}  // namespace

LinearResult linear_exact(const LinearHead& in) {
  const int64_t d = in.d, query_blocks = (in.nq + in.block_q - 1) / in.block_q,
                key_blocks = (in.nk + in.block_k - 1) / in.block_k;
  const auto sees = [&](int64_t i, int64_t j) { return !in.excluded || !in.excluded(i, j); };
  const Values phi_q = features(in.q, zeros(d), in.nq, d);
  const Values phi_k =
      features(in.k, in.mean_free_keys ? mean_of(in.k, in.nk, d) : zeros(d), in.nk, d);

  std::vector<State> of_keys(static_cast<size_t>(key_blocks), State(d));
  for (int64_t t = 0; t < in.nk; ++t) {
    State& s = of_keys[t / in.block_k];
    for (int64_t a = 0; a < d; ++a) {
      s.z[a] += phi_k[t * d + a];
      for (int64_t e = 0; e < d; ++e) s.h[a * d + e] += phi_k[t * d + a] * in.v[t * d + e];
    }
  }
  std::vector<State> of_queries(static_cast<size_t>(query_blocks), State(d));
  for (int64_t i = 0; i < query_blocks; ++i)
    for (int64_t j = 0; j < key_blocks; ++j)
      if (sees(i, j)) of_queries[i].add(of_keys[j]);

  LinearResult out;
  out.o = zeros(in.nq * d), out.norm = zeros(in.nq);
  for (int64_t r = 0; r < in.nq; ++r) {
    const State& s = of_queries[r / in.block_q];
    for (int64_t a = 0; a < d; ++a) out.norm[r] += phi_q[r * d + a] * s.z[a];
    if (out.norm[r] == 0) continue;
    for (int64_t a = 0; a < d; ++a)
      for (int64_t e = 0; e < d; ++e)
        out.o[r * d + e] += phi_q[r * d + a] * s.h[a * d + e] / out.norm[r];
  }
  if (in.dout == nullptr) return out;

  out.dq = zeros(in.nq * d), out.dk = zeros(in.nk * d), out.dv = out.dk;
  std::vector<State> d_queries(static_cast<size_t>(query_blocks), State(d));
  for (int64_t r = 0; r < in.nq; ++r) {
    const State& s = of_queries[r / in.block_q];
    State& ds = d_queries[r / in.block_q];
    const double n = out.norm[r];
    if (n == 0) continue;
    double dn = in.dnorm != nullptr ? in.dnorm[r] : 0.0;
    for (int64_t e = 0; e < d; ++e) dn -= in.dout[r * d + e] * out.o[r * d + e] / n;
    for (int64_t a = 0; a < d; ++a) {
      ds.z[a] += phi_q[r * d + a] * dn;
      out.dq[r * d + a] += s.z[a] * dn;
      for (int64_t e = 0; e < d; ++e) {
        ds.h[a * d + e] += phi_q[r * d + a] * in.dout[r * d + e] / n;
        out.dq[r * d + a] += s.h[a * d + e] * in.dout[r * d + e] / n;
      }
    }
  }
  back_through_features(phi_q, out.dq, in.nq, d);

  std::vector<State> d_keys(static_cast<size_t>(key_blocks), State(d));
  for (int64_t i = 0; i < query_blocks; ++i)
    for (int64_t j = 0; j < key_blocks; ++j)
      if (sees(i, j)) d_keys[j].add(d_queries[i]);
  for (int64_t t = 0; t < in.nk; ++t) {
    const State& ds = d_keys[t / in.block_k];
    for (int64_t a = 0; a < d; ++a) {
      out.dk[t * d + a] += ds.z[a];
      for (int64_t e = 0; e < d; ++e) {
        out.dk[t * d + a] += ds.h[a * d + e] * in.v[t * d + e];
        out.dv[t * d + e] += phi_k[t * d + a] * ds.h[a * d + e];
      }
    }
  }
  back_through_features(phi_k, out.dk, in.nk, d);
  if (in.mean_free_keys) {
    const Values mean = mean_of(out.dk.data(), in.nk, d);
    for (int64_t t = 0; t < in.nk; ++t)
      for (int64_t a = 0; a < d; ++a) out.dk[t * d + a] -= mean[a];
  }
  return out;
}

}  // namespace sagebwd::ref
