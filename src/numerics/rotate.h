// SPDX-License-Identifier: Apache-2.0
// The rotation of Q and K: x·R with R = diag(signs)·H/√n, H the Hadamard matrix of size n. R is
// orthogonal, so (Q·R)·(K·R)ᵀ = Q·Kᵀ; but an outlier channel is spread over all channels, and the
// scale of a token no longer has to cover it alone.
//
// A head dim that is not a power of two is cut into blocks of its largest power-of-two divisor.
// Every backend adds in this order (neighbours first) and in FP32, so that codes agree bit for bit;
// but cuda-sm90 adds on tensor cores, and a few of its codes in a million round the other way.
#pragma once

#include <cstdint>

#include "base/inline.h"

namespace sagebwd::numerics {

inline constexpr int kMostRotated = 256;  // channels

/// Signs of 32 channels from 32·word on, bit c of channel 32·word + c: 1 is minus. They are the
/// first fractional bits of √2, √3, √5, √7, √11, √13, √17 and √19 and never change, because codes
/// are saved. (A function, because device code cannot index a constant array.)
SAGE_INLINE uint32_t rotation_signs(int word) {
  switch (word) {
    case 0:
      return 0x6a09e667u;
    case 1:
      return 0xbb67ae85u;
    case 2:
      return 0x3c6ef372u;
    case 3:
      return 0xa54ff53au;
    case 4:
      return 0x510e527fu;
    case 5:
      return 0x9b05688cu;
    case 6:
      return 0x1f83d9abu;
    default:
      return 0x5be0cd19u;
  }
}

SAGE_INLINE bool rotation_flips(int channel) {
  return (rotation_signs(channel / 32) >> (channel % 32) & 1) != 0;
}

/// Channels that are mixed with one another.
SAGE_INLINE int rotation_block(int d) { return d & -d; }

/// 1/√n for a power of two n up to 256.
SAGE_INLINE float rotation_unit(int n) {
  constexpr float kRootHalf = 0.70710678118654752440f;
  float unit = 1.0f;
  for (; n >= 4; n /= 4) unit *= 0.5f;
  return n == 2 ? unit * kRootHalf : unit;
}

namespace detail {

SAGE_INLINE void hadamard(float* x, int n) {
  for (int h = 1; h < n; h *= 2)
    for (int i = 0; i < n; i += 2 * h)
      for (int j = i; j < i + h; ++j) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b, x[j + h] = a - b;
      }
  const float unit = rotation_unit(n);
  for (int i = 0; i < n; ++i) x[i] *= unit;
}

}  // namespace detail

/// x ← x·R, d channels of one token.
SAGE_INLINE void rotate(float* x, int d) {
  for (int c = 0; c < d; ++c)
    if (rotation_flips(c)) x[c] = -x[c];
  const int n = rotation_block(d);
  for (int c = 0; c < d; c += n) detail::hadamard(x + c, n);
}

/// x ← x·Rᵀ: turns gradients back.
SAGE_INLINE void rotate_back(float* x, int d) {
  const int n = rotation_block(d);
  for (int c = 0; c < d; c += n) detail::hadamard(x + c, n);
  for (int c = 0; c < d; ++c)
    if (rotation_flips(c)) x[c] = -x[c];
}

}  // namespace sagebwd::numerics
