// SPDX-License-Identifier: Apache-2.0
// Means of K and V per sequence and key head, in the spans and runs of tuned/runs.cuh.
//
// A product adds tokens up, eight at a time (TokenRows). These sums are FP32 and rounded once; all
// further ones are FP64.
#pragma once

#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/operand.cuh"
#include "cuda/sm90/quantize/job.h"
#include "cuda/sm90/quantize/values.cuh"
#include "cuda/tuned/runs.cuh"
#include "numerics/quantize.h"
#include "numerics/rotate.h"

namespace sagebwd::cuda::sm90::codes {

using tuned::Runs;

template <typename T, int D>
struct RunMean {
  using S = Shape<D>;
  using Shared = typename SharedPlan<T, D>::Means;

  // A larger sum may have been infinite on the way.
  static constexpr double kLargest = 0x1p127;

  const CodesJob& job;
  Shared& shared;
  Place<D> place = {};
  // The sums of the run so far, of the warps that add: element 2·j + e is that of tokens
  // 8·m … 8·m + 7 of each block, m = lane / 4 or that plus 8, in channel 8·j + 2·(lane % 4) + e of
  // the warpgroup's panel.
  double sum[16] = {};

  /// The first warp of each warpgroup has the rows that take tokens.
  __device__ bool adds() const { return place.thread % 128 < 32; }

  /// Adds the tokens of a stage up. Nobody reads them any more when this returns.
  __device__ void add_tokens(float (&few)[32], uint32_t stage, uint32_t token_rows) const {
    const Operand<kRowBytes> ones{token_rows, 0},
        tokens{stage + place.warpgroup * arch::places(kPanelBytes), 0};
    arch::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlock / 16; ++step)
      arch::wgmma_16_by_rows<T>(few, ones.from_row(step / 4 * 16).step(step % 4),
                                tokens.from_row(step * 16).step(0), step > 0);
    arch::wgmma_commit();
    arch::wgmma_wait<0>();
    arch::settle(few);
  }

  __device__ void add(const float (&few)[32]) {
    if (!adds()) return;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[2 * j + e] += static_cast<double>(few[4 * j + e]);
        sum[2 * j + e] += static_cast<double>(few[4 * j + 2 + e]);
      }
  }

  /// The lane keeps the upper or the lower kHalf of 2·kHalf channels, and gets another lane's sums
  /// of these.
  template <int kHalf>
  __device__ __forceinline__ void hand_over() {
    const bool upper = (place.lane() & 2 * kHalf) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const double give = upper ? sum[i] : sum[i + kHalf], kept = upper ? sum[i + kHalf] : sum[i];
      sum[i] = kept + __shfl_xor_sync(0xffffffffu, give, 2 * kHalf);
    }
  }

  /// Writes the sums of the run that ends with this piece. The warp that finishes the last run of a
  /// sequence makes its mean. No other warp of the thread block waits for that.
  __device__ void finish_run(const Piece& piece) {
    if (!adds()) return;
    const bool of_k = piece.kind == Kind::k_mean;
    const MeanJob& mean = of_k ? job.k_mean : job.v_mean;
    const int64_t part = static_cast<int64_t>(piece.head) * job.k_blocks + piece.run_first;
    hand_over<8>(), hand_over<4>(), hand_over<2>();  // now the lane's bits 4, 3 and 2 name j
    const uint32_t channel = place.warpgroup * 64 + place.lane() / 4 * 8 + place.member() * 2;
    const bool bad = !(fabs(sum[0]) <= kLargest) || !(fabs(sum[1]) <= kLargest);
    int count = (piece.block - piece.run_first) * kBlock + min(piece.left, kBlock);
    if (any_is_bad(bad)) count = add_carefully(piece, of_k ? job.k : job.v, channel);
    *reinterpret_cast<double2*>(mean.part + part * D + channel) = make_double2(sum[0], sum[1]);
    if (channel == 0) mean.tokens[part] = count;
#pragma unroll
    for (double& x : sum) x = 0.0;
    __threadfence();
    __syncwarp();
    const Runs runs(piece.s, job.seq.documents != nullptr);
    bool last = false;
    if (place.lane() == 0)
      last =
          atomicAdd(mean.arrived + static_cast<int64_t>(piece.s.index) * job.hk + piece.head, 1u) +
              1 ==
          static_cast<uint32_t>(runs.count * S::kWarpgroups);
    if (!__any_sync(0xffffffffu, last)) return;
    __threadfence();
    finish(mean, piece, runs);
  }

  /// Whether a warp that adds has bad sums. All of these meet here.
  __device__ bool any_is_bad(bool mine) {
    mine = __any_sync(0xffffffffu, mine);
    if constexpr (S::kWarpgroups > 1) {
      if (place.lane() == 0) shared.bad_sums[place.warpgroup] = mine;
      meet<D>(Meeting::adding_warps);
#pragma unroll
      for (int i = 0; i < S::kWarpgroups; ++i) mine |= shared.bad_sums[i];
      meet<D>(Meeting::adding_warps);  // all have read this
    }
    return mine;
  }

  /// The same sums without tokens that hold NaN or Inf. The others may be of any size. Returns how
  /// many those are.
  __device__ int add_carefully(const Piece& piece, const Strided& x, uint32_t channel) {
    const tile::Sequence& s = piece.s;
    const int begin = piece.first - (piece.block - piece.run_first) * kBlock,
              end = piece.first + min(piece.left, kBlock);
    sum[0] = sum[1] = 0.0;
    int count = 0;
#pragma unroll 1
    for (int token = begin; token < end; ++token) {
      const T* row = tile::row_of<const T>(x, s, piece.head, s.k_begin + token);
      bool bad = false;
      for (uint32_t c = place.lane(); c < D; c += 32)
        bad |= !numerics::is_finite(static_cast<float>(row[c]));
      if (__any_sync(0xffffffffu, bad)) continue;
      ++count;
      sum[0] += static_cast<double>(static_cast<float>(row[channel]));
      sum[1] += static_cast<double>(static_cast<float>(row[channel + 1]));
    }
    return count;
  }

  /// Adds the runs of a sequence up, in order. A lane has neighbouring channels.
  __device__ void finish(const MeanJob& mean, const Piece& piece, const Runs& runs) {
    constexpr int kEach = D / 32;
    const int first = static_cast<int>(place.lane()) * kEach;
    const int64_t base = static_cast<int64_t>(piece.head) * job.k_blocks,
                  row = (static_cast<int64_t>(piece.s.index) * job.hk + piece.head) * D + first;
    double all[kEach] = {};
    int count = 0;
#pragma unroll 4
    for (int run = 0; run < runs.count; ++run) {
      const int64_t part = base + runs.block(run);
      count += __ldcg(mean.tokens + part);
#pragma unroll
      for (int e = 0; e < kEach; e += 2) {
        const double2 two =
            __ldcg(reinterpret_cast<const double2*>(mean.part + part * D + first + e));
        all[e] += two.x, all[e + 1] += two.y;
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float value =
          count > 0 ? static_cast<float>(all[e] / static_cast<double>(count)) : 0.0f;
      all[e] = static_cast<double>(value);
      mean.mean[row + e] = value == 0.0f ? -0.0f : value;
      if (mean.saved != nullptr) mean.saved[row + e] = value;
    }
    if (mean.turned == nullptr) return;
    if (job.rotation > 0) rotate(all, first);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float turned = static_cast<float>(all[e]);
      mean.turned[row + e] = turned == 0.0f ? -0.0f : turned;
    }
  }

  /// The rotation of what the warp has, without the factor 1/√D.
  template <int kEach>
  __device__ void rotate(double (&x)[kEach], int first) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (numerics::rotation_flips(first + e)) x[e] = -x[e];
#pragma unroll
    for (int h = 1; h < kEach; h *= 2)
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if ((e & h) == 0) {
          const double a = x[e], b = x[e + h];
          x[e] = a + b, x[e + h] = a - b;
        }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2)
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const double other = __shfl_xor_sync(0xffffffffu, x[e], lanes);
        x[e] = (place.lane() & static_cast<uint32_t>(lanes)) != 0 ? other - x[e] : x[e] + other;
      }
  }
};

}  // namespace sagebwd::cuda::sm90::codes
