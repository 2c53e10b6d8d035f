// SPDX-License-Identifier: Apache-2.0
// The linear branch of sparse-linear attention: each block of queries sees, at linear cost, the key
// blocks that its list does not have.
//
//   φ(x) = softmax over the channels          K̃ = K − mean of K over the sequence
//   h_j = φ(K̃_j)ᵀ·V_j   z_j = φ(K̃_j)ᵀ·1     H, Z = sums over the blocks j that are not excluded
//   n = φ(q)·Z           O = φ(q)·H / n
//
// The caller owns all memory. Calls validate first and throw sagebwd::Error before anything is
// written. Sums are FP32 or better. The bits of a result do not depend on the number of threads.
// There are no masks and no documents: a causal caller excludes every block that is not wholly in
// the past, with mean_free_keys = false, and a packed batch takes a call per document.
#pragma once

#include <cstddef>
#include <string>

#include "sagebwd/attention.h"
#include "sagebwd/mix.h"

namespace sagebwd {

enum class FeatureMap : int { softmax = 0 };

/// What forward and backward share.
struct LinearArgs {
  TensorView q;         // [b, h,  nq, d]
  TensorView k;         // [b, hk, nk, d], h a multiple of hk
  TensorView v;         // [b, hk, nk, d]
  BlockLists excluded;  // optional; `lead` is not looked at
  FeatureMap phi = FeatureMap::softmax;
  bool mean_free_keys = true;  // false: φ gets K as it is
  /// Optional, and for a GPU only: the means of K and V over the sequence where the caller has
  /// them, FP32 [b, hk, d], aligned to 16, without tokens that hold NaN or Inf. Both or neither.
  const float *k_mean = nullptr, *v_mean = nullptr;

  Device device = Device::cpu;
  void* workspace = nullptr;  // workspace_size() bytes of any alignment
  size_t workspace_bytes = 0;
  Allocator allocator;  // asked for the workspace if that is null and the call needs some: a call
                        // is then checked once, not for workspace_size() as well
  ParallelFor parallel_for;
  void* stream = nullptr;  // cudaStream_t for Device::cuda
};

/// A query that has no key left gets o = 0, norm = 0 and no gradient.
struct LinearForwardArgs : LinearArgs {
  TensorView o;    // [b, h, nq, d], written
  StatsView norm;  // optional, [b, h, nq], written: n

  // What follows is optional, and for a GPU only.
  /// With α the call mixes, too: o = α·sparse + (1 − α)·O, and sparse where no key is left. Blocks
  /// of α are multiples of 64, and its numbers are from 0 to 1.
  Alpha alpha;
  TensorView sparse;  // [b, h, nq, d]
  /// averages_size() bytes, aligned to 16, that the backward would otherwise make again: written.
  void* averages = nullptr;
  size_t averages_bytes = 0;
};

/// The backward makes h, H and O again; it needs nothing of the forward, unless averages are given.
struct LinearBackwardArgs : LinearArgs {
  TensorView dout;  // [b, h,  nq, d]
  StatsView dnorm;  // optional gradient of norm
  TensorView dq;    // [b, h,  nq, d], written
  TensorView dk;    // [b, hk, nk, d], written
  TensorView dv;    // [b, hk, nk, d], written

  // What follows is optional, and for a GPU only.
  /// With the α of a forward that mixed, dout is the gradient of what it gave, dnorm has no place,
  /// and the gradients of the sparse branch are added to dq, dk and dv.
  Alpha alpha;
  TensorView dq_sparse;                // [b, h,  nq, d]
  TensorView dk_sparse;                // [b, hk, nk, d]
  TensorView dv_sparse;                // [b, hk, nk, d]
  const float* alpha_parts = nullptr;  // of mix_sparse_backward(); wanted for dα
  float* dalpha = nullptr;             // like alpha, written
  const void* averages = nullptr;      // of the forward, with the same lists, q, k, v and means
  size_t averages_bytes = 0;
};

/// Bytes of workspace the call needs. Validates the arguments (workspace fields and data pointers
/// are not looked at).
SAGEBWD_API size_t workspace_size(const LinearForwardArgs& args);
SAGEBWD_API size_t workspace_size(const LinearBackwardArgs& args);
/// Bytes of averages: a matrix d × d of 16-bit numbers for every block of queries, and little more.
SAGEBWD_API size_t averages_size(const LinearForwardArgs& args);

/// Why no implementation serves the call: a line for each. Empty: one does. Validates likewise. An
/// implementation that SAGEBWD_IMPL names and that has no linear branch refuses all of them.
SAGEBWD_API std::string refusal(const LinearForwardArgs& args);
SAGEBWD_API std::string refusal(const LinearBackwardArgs& args);

SAGEBWD_API void linear_forward(const LinearForwardArgs& args);
SAGEBWD_API void linear_backward(const LinearBackwardArgs& args);

}  // namespace sagebwd
