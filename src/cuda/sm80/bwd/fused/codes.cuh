// SPDX-License-Identifier: Apache-2.0
// Codes of P and dS in the fused backward, and how warps hand them to each other.
#pragma once

#include <cstddef>

#include "cuda/arch/transpose.cuh"
#include "cuda/sm80/bwd/fused/scores.cuh"
#include "cuda/tile/codes.cuh"

namespace sagebwd::cuda::sm80 {

template <typename T, class Shape>
struct FusedCodes : FusedScores<T, Shape> {
  using Lane = FusedScores<T, Shape>;
  using Lane::base, Lane::thread;
  using typename Lane::Rows, typename Lane::Scores, typename Lane::Shared, typename Lane::Columns;
  static constexpr int kM = Shape::kM, kQueryBlocks = Shape::kQueryBlocks;
  static constexpr int kThreads = Shape::kThreads;
  using Codes = uint32_t[kM][kQueryBlocks / 2][2];  // half a contraction step: rows g and g + 8
  using QueryCodes = uint32_t[2][4];

  using Lane::Lane;
  template <typename V>
  __device__ V& at(uint32_t address) const {
    return Lane::template at<V>(address);
  }

  __device__ static void fill(Rows& x, float value) {
    x[0][0] = x[0][1] = x[1][0] = x[1][1] = value;
  }
  template <tile::Bytes kCode>
  __device__ static void quantize(Codes& codes, const Scores& x, const Rows& inverses) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float inverse = inverses[m][r];
#pragma unroll
        for (int n = 0; n < kQueryBlocks; n += 2)
          codes[m][n / 2][r] =
              tile::codes_of<kCode>(x[m][n][2 * r], inverse, x[m][n][2 * r + 1], inverse,
                                    x[m][n + 1][2 * r], inverse, x[m][n + 1][2 * r + 1], inverse);
      }
  }

  /// Hands this warp's codes to the warp that shares its keys.
  __device__ void put_codes(uint32_t to, const Codes& codes) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
      at<uint4>(base + to + thread * 16 + m * kThreads * 16) =
          make_uint4(codes[m][0][0], codes[m][0][1], codes[m][1][0], codes[m][1][1]);
  }
  /// Codes of y with one scale per query, as A operands with queries as rows; `mine` are this
  /// warp's two, of 16 queries each.
  __device__ void put_query_codes(QueryCodes& mine, const Scores& y, const Columns& inverse) const {
#pragma unroll
    for (int n = 0; n < kQueryBlocks; n += 2) {
      uint32_t a[kM][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float i0 = inverse[0][n + h], i1 = inverse[1][n + h];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const float(&v)[4] = y[m][n + h];
          a[m][h] = arch::transpose_8x8(
              tile::codes_of<tile::Bytes::s8>(v[0], i0, v[2], i0, v[1], i1, v[3], i1));
        }
      }
      at<uint4>(base + static_cast<uint32_t>(offsetof(Shared, both.codes.query)) + thread * 16 +
                n / 2 * kThreads * 16) = make_uint4(a[0][0], a[0][1], a[1][0], a[1][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[n / 2][i] = a[i / 2][i % 2];
    }
  }
  /// The same from codes that have one scale for keys and queries.
  __device__ void turn_codes(const Codes& codes) const {
#pragma unroll
    for (int n = 0; n < kQueryBlocks; n += 2) {
      uint32_t a[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const uint32_t(&rows)[2] = codes[m][n / 2];
        a[m][0] = arch::transpose_8x8(arch::byte_permute(rows[0], rows[1], 0x5140));
        a[m][1] = arch::transpose_8x8(arch::byte_permute(rows[0], rows[1], 0x7362));
      }
      at<uint4>(base + static_cast<uint32_t>(offsetof(Shared, both.codes.query)) + thread * 16 +
                n / 2 * kThreads * 16) = make_uint4(a[0][0], a[0][1], a[1][0], a[1][1]);
    }
  }
};

}  // namespace sagebwd::cuda::sm80
