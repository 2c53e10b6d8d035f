// SPDX-License-Identifier: Apache-2.0
// O += P·V, in INT8 or in 16 bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/sm80/fwd/softmax.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/layout.h"
#include "cuda/tile/shared_tile.cuh"
#include "numerics/octaves.h"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80::fwd {

/// O += weight·P8·V8. A poisoned tile is noted. Its poisoned values have codes 0; in `paper` the
/// tile adds nothing here.
template <Config kConfig>
__device__ void multiply_int8(Accumulators<kConfig>& sums, const Thread<kConfig>& me,
                              const Codes<kConfig>& a, const TileRows& rows, int stage) {
  using Stage = typename SharedPlan<kConfig>::Stage;
  constexpr int D = kConfig.d;
  const float scale = me.v_scale(stage);
  const float unit = !kConfig.paper ? me.p.p_unit : scale == scale ? scale * me.p.p_unit : 0.0f;
  if (scale != scale && me.index == 0) me.any_poisoned() = 1;
  const float w[2] = {rows.weight[0] * unit, rows.weight[1] * unit};
#pragma unroll
  for (int r = 0; r < 2; ++r) sums.starts[r] = tile::count_start(w[r], sums.starts[r]);
  const uint32_t v8t =
      me.stage_at(stage) + static_cast<uint32_t>(offsetof(Stage, v8t)) + me.value_offset;
  // Several blocks of channels at a time: chains of products that do not wait for each other.
  constexpr int kAtOnce = D == 64 ? 2 : 4;
#pragma unroll
  for (int c = 0; c < kConfig.channel_blocks(); c += kAtOnce) {
    int acc[kAtOnce][4];
#pragma unroll
    for (int k = 0; k < kConfig.key_steps(); k += 2) {
      uint32_t b[kAtOnce][4];
#pragma unroll
      for (int h = 0; h < kAtOnce; ++h)
        arch::ldmatrix_x4(b[h], v8t + (k / 2 * D + (c + h) * 8) * kSlab);
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int h = 0; h < kAtOnce; ++h)
          k + step == 0 ? tile::start_sum<tile::Bytes::u8>(acc[h], a[0], b[h][0], b[h][1])
                        : arch::mma_8<tile::Bytes::u8>(acc[h], a[k + step], b[h][2 * step],
                                                       b[h][2 * step + 1]);
    }
#pragma unroll
    for (int h = 0; h < kAtOnce; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums.o[c + h][e] = tile::add_with_start(acc[h][e], w[e >> 1], sums.o[c + h][e]);
  }
}

/// O += weight·P·V, with P in the type of V. `stage` holds V in 16 bit, or its codes.
template <typename T, Config kConfig>
__device__ void multiply_16(Accumulators<kConfig>& sums, const Thread<kConfig>& me,
                            const Scores<kConfig>& x, const TileRows& rows, int stage) {
  constexpr int D = kConfig.d;
  const float w[2] = {rows.weight[0] * me.p.p_unit, rows.weight[1] * me.p.p_unit};
  const uint32_t v = me.stage_at(stage);
#pragma unroll
  for (int k = 0; k < kConfig.tile_k / 16; ++k) {
    uint32_t a[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* pair = &x[2 * k + (r >> 1)][2 * (r & 1)];
      a[r] = tile::pack_16<T>(pair[0] * w[r & 1], pair[1] * w[r & 1]);
    }
#pragma unroll
    for (int c = 0; c < kConfig.channel_blocks(); c += 2) {
      uint32_t b[4];
      tile::load_b_trans<2 * D>(b, v + k * 32 * D, static_cast<uint32_t>(c), me.lane());
      arch::mma_16<T>(sums.o[c], a, b[0], b[1]);
      arch::mma_16<T>(sums.o[c + 1], a, b[2], b[3]);
    }
  }
}

/// Behind the tiles of an octave: what its V lacks goes to O, P's row sum times the centre. Rows
/// that see none of them stay what they are.
template <Config kConfig>
__device__ void leave_octave(Accumulators<kConfig>& sums, const Thread<kConfig>& me, int octave) {
  const tuned::Centres& centres = me.p.value_centres;
  sums.settle();
  PerRow sum;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = tile::quad_sum(sums.sum[r]);
    sums.sum[r] = 0.0f;
    if (me.t() == 0) me.sum_before(r) += sum[r];
    sum[r] *= me.p.p_unit;
  }
  if (centres.codes == nullptr || octave < numerics::kFirstValueCentre) return;
  const Work<kConfig>& w = me.work();
  const int64_t row =
      centres.row(w.head / me.p.group, w.s.k_pad / kBlock, numerics::first_block_of(octave));
  const float scale = centres.scale[row];
#pragma unroll
  for (int c = 0; c < kConfig.channel_blocks(); ++c) {
    const int channel = c * 8 + static_cast<int>(2 * me.t());
    if (channel >= me.p.d) break;
    const int8_t* code = centres.codes + row * me.p.d + channel;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      sums.o[c][e] = fmaf(sum[e >> 1], scale * static_cast<float>(code[e & 1]), sums.o[c][e]);
  }
}

/// Makes NaN of the rows that see a poisoned value, but in `paper`. No other row learns of it.
template <Config kConfig>
__device__ void mark_rows(Accumulators<kConfig>& sums, const Thread<kConfig>& me) {
  const Work<kConfig>& w = me.work();
  bool bad[2] = {};
  for (int step = 0; step < w.walk.steps; ++step) {
    const int first = w.walk.tile(step) * kConfig.tile_k, end = min(first + kConfig.tile_k, w.s.nk);
    const uint32_t row = me.key_row(w.walk.tile(step));
    const float of_block = me.p.v_tile_scale[row / kBlock];
    if (of_block == of_block) continue;
    for (int key = first; key < end; ++key) {
      const float scale = me.p.v_scale[row + static_cast<uint32_t>(key - first)];
      if (scale == scale) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) bad[r] |= static_cast<uint32_t>(key - me.band_of(r)) < me.seen(r);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int c = 0; c < kConfig.channel_blocks(); ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (bad[r]) sums.o[c][2 * r + e] = __int_as_float(0x7fffffff);
}

/// Zeroes NaN and Inf of V in 16 bit. As 0·NaN they would reach rows that do not see them.
template <typename T, Config kConfig>
__device__ void clean_v16(const Thread<kConfig>& me, int stage) {
  T* v = &at<T>(me.stage_at(stage));
  for (uint32_t i = me.index; i < kConfig.tile_k * kConfig.d; i += kConfig.threads())
    if (!numerics::is_finite(static_cast<float>(v[i]))) v[i] = T(0.0f);
}

/// Gives NaN and Inf of V to the rows that do see them.
template <typename T, Config kConfig>
__device__ void spread_poison(Accumulators<kConfig>& sums, const Thread<kConfig>& me, int tile) {
  constexpr int D = kConfig.d, kTileK = kConfig.tile_k;
  const int end = min((tile + 1) * kTileK, me.work().s.nk);
  for (int key = tile * kTileK; key < end; ++key) {
    const T* v = static_cast<const T*>(me.p.v16) + static_cast<uint64_t>(me.key_row(0) + key) * D +
                 2 * me.t();
#pragma unroll
    for (int c = 0; c < kConfig.channel_blocks(); ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float value = static_cast<float>(v[c * 8 + e]);
        if (numerics::is_finite(value)) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (static_cast<uint32_t>(key - me.band_of(r)) < me.seen(r))
            sums.o[c][2 * r + e] += value;
      }
  }
}

}  // namespace sagebwd::cuda::sm80::fwd
