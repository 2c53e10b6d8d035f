// SPDX-License-Identifier: Apache-2.0
// The linear branch of one query head in FP64, forward and backward, written straight from the
// formulas. It shares no code with the rest of the library, so that it can judge all of it.
//
//   φ(x) = softmax over the channels,  K̃ = K − mean of K (or K)
//   h_j = φ(K̃_j)ᵀ·V_j   z_j = φ(K̃_j)ᵀ·1   H_i, Z_i = sums over the key blocks j that i does not
//   exclude   n_r = φ(q_r)·Z_i   O_r = φ(q_r)·H_i / n_r
//   D_r = dO_r·O_r   dH_i = Σ_r φ(q_r)ᵀ·dO_r / n_r   dZ_i = Σ_r φ(q_r)ᵀ·(dn_r − D_r/n_r)
//   dφ(q_r) = H_i·dO_r / n_r + Z_i·(dn_r − D_r/n_r)
//   dh_j, dz_j = sums of dH_i, dZ_i over the blocks i that do not exclude j
//   dφ(k_t) = dh_j·v_t + dz_j   dV_t = φ(k_t)·dh_j   dx = φ∘(dφ − φ·dφ)   dK = g − mean of g
//
// A query that has no key left has o = 0, norm = 0 and no gradient.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace sagebwd::ref {

struct LinearHead {
  int64_t nq = 0, nk = 0, d = 0;
  const double* q = nullptr;      // [nq, d]
  const double* k = nullptr;      // [nk, d]
  const double* v = nullptr;      // [nk, d]
  const double* dout = nullptr;   // [nq, d]; null: forward only
  const double* dnorm = nullptr;  // [nq]; null: zero
  int64_t block_q = 128, block_k = 64;
  /// Whether a block of queries excludes a block of keys; empty: none does.
  std::function<bool(int64_t query_block, int64_t key_block)> excluded;
  bool mean_free_keys = true;
};

struct LinearResult {
  std::vector<double> o, norm;     // [nq, d], [nq]
  std::vector<double> dq, dk, dv;  // [nq, d], [nk, d], [nk, d]; empty in a forward-only run
};

LinearResult linear_exact(const LinearHead& head);

}  // namespace sagebwd::ref
