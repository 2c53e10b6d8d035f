// SPDX-License-Identifier: Apache-2.0
// A consumer: a warpgroup with 64 of the keys. Scores are transposed, rows are keys.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/arch/half2.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/bwd/keys.cuh"
#include "cuda/sm90/bwd/parts.cuh"
#include "cuda/sm90/bwd/results.cuh"
#include "cuda/sm90/bwd/shared.cuh"
#include "cuda/sm90/codes.cuh"
#include "cuda/sm90/operand.cuh"

namespace sagebwd::cuda::sm90::bwd {

/// Scores of 64 keys x 64 queries, a slab: element 4·j + 2·r + e is key lane/4 + 8·r of the warp's
/// 16, query 8·j + 2·(lane % 4) + e. Pairs of halves: element 2·j + r.
using Scores = int[32];
using Gradients = float[32];
using Halves = uint32_t[16];

template <typename T, int D>
struct Consumer {
  using Plan = SharedPlan<D>;
  static constexpr int kSlabs = bwd::kSlabs<D>, kQueries = bwd::kQueries<D>;
  // Of a tile of queries.
  using AllScores = Scores[kSlabs];
  using AllHalves = Halves[kSlabs];
  using Codes = uint32_t[8 * kSlabs];  // A operands
  using SlabCodes = uint32_t[8];

  const BackwardParams& p;
  Plan& shared;
  int warpgroup;        // its number
  uint32_t warp, lane;  // warp: inside the warpgroup
  uint32_t place;       // of the shared memory, for products
  Tile tile{};

  // Operands. Of the keys a consumer has its own 64, of 16-bit ones in each panel of 64 channels;
  // transposed codes of Q and dO have a row per channel.
  __device__ Operand<D> k8() const { return {mine_at(D), offsetof(Plan, k8)}; }
  __device__ Operand<128> v16() const { return {mine_at(128), offsetof(Plan, v16)}; }
  __device__ Operand<D> q8(Tile of) const { return {front_at(of), offsetof(Plan, front)}; }
  __device__ Operand<128> do16() const {
    return {front_at(tile), offsetof(Plan, front) + kQueries * D};
  }
  __device__ Operand<kSlab> q8t() const { return {back(), offsetof(Plan, back)}; }
  __device__ Operand<kSlab> do8t() const { return {back(), offsetof(Plan, back) + kQueries * D}; }
  __device__ uint32_t mine_at(int row_bytes) const {
    return place + static_cast<uint32_t>(warpgroup) * arch::places(64 * row_bytes);
  }
  __device__ uint32_t front_at(Tile of) const {
    return place + of.place() * arch::places(sizeof(typename Plan::Front));
  }
  __device__ uint32_t back() const {
    return place + tile.place() * arch::places(sizeof(typename Plan::Back));
  }

  __device__ const QueryStats& stats_of(int slab) const {
    return shared.front[tile.place()].stats[slab];
  }
  __device__ const OctaveStats& octave_stats_of(int slab) const {
    return shared.front[tile.place()].octave[slab];
  }
  __device__ int first_key() const {
    return warpgroup * 64 + static_cast<int>(warp * 16 + lane / 4);
  }
  // Where no registers are left to keep them in, every tile reads them again.
  static constexpr bool kKeepsValueScales = kSlabs == 1;
  __device__ float value_scale_of(int r) const { return shared.v_scale[first_key() + 8 * r]; }
  /// A score, times the scale of its key. Those are read again, likewise.
  __device__ __forceinline__ float score_of(int sum, int r) const {
    return __fmul_rn(static_cast<float>(sum), shared.k_scale[first_key() + 8 * r]);
  }

  /// S = K8·Q8ᵀ of a tile; only issued.
  __device__ __forceinline__ void issue_scores(AllScores& s, Tile of) const {
    const Operand<D> keys = k8(), queries = q8(of);
#pragma unroll
    for (Scores& of_slab : s) arch::settle(of_slab);
    arch::wgmma_fence();
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
      for (int step = 0; step < D / 32; ++step)
        arch::wgmma_8(s[slab], keys.step(step), queries.from_row(slab * kSlab).step(step),
                      step > 0);
    arch::wgmma_commit();
  }
  __device__ __forceinline__ void issue_next_scores(AllScores& s, bool more) const {
    const Tile next = tile.next();
    if (more) wait_for(shared.front_full, next);
    issue_scores(s, next);
  }

  /// dP = V8·dOᵀ of a slab, still without the scale of V; only issued.
  __device__ __forceinline__ void issue_gradients(Gradients& dp, int slab) const {
    const Operand<128> values = v16(), douts = do16().from_row(slab * kSlab);
    arch::settle(dp);
    arch::wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        arch::wgmma_16<T>(dp, values.from_row(panel * kKeys).step(step),
                          douts.from_row(panel * kQueries).step(step), panel + step > 0);
    arch::wgmma_commit();
  }

  /// P of a slab as halves.
  template <bool kMasked>
  __device__ __forceinline__ void exponentials(Halves& h, const Scores& s, int slab,
                                               int query) const {
    const float *factors = stats_of(slab).factor, *exponents = octave_stats_of(slab).exponent;
    // Nothing of this is worked out earlier: registers would not suffice.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 queries
      const float4 factor = *reinterpret_cast<const float4*>(factors + 16 * i + lane % 4 * 4),
                   exponent = *reinterpret_cast<const float4*>(exponents + 16 * i + lane % 4 * 4);
      const float f[4] = {factor.x, factor.y, factor.z, factor.w},
                  x[4] = {exponent.x, exponent.y, exponent.z, exponent.w};
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int j = 2 * i + b;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float y[2];
#pragma unroll
          for (int e = 0; e < 2; ++e)
            y[e] = arch::exp2_approx(
                fmaf(score_of(s[4 * j + 2 * r + e], r), f[2 * b + e], x[2 * b + e]));
          h[2 * j + r] = arch::half2_of(y[0], y[1]);
        }
      }
    }
    if constexpr (kMasked) hide(h, query);
  }

  /// Zeroes what the mask hides.
  __device__ __forceinline__ void hide(Halves& h, int query) const {
    const Walk& w = shared.walk;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = w.key0 + first_key() + 8 * r;
      const uint32_t seen = key < w.s.nk ? w.band.width() : 0,
                     here = static_cast<uint32_t>(key - w.band.begin - query -
                                                  static_cast<int>(lane % 4 * 2));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (here - static_cast<uint32_t>(8 * j) >= seen) h[2 * j + r] &= 0xffff0000u;
        if (here - static_cast<uint32_t>(8 * j + 1) >= seen) h[2 * j + r] &= 0x0000ffffu;
      }
    }
  }

  /// dS = P·(dP - D) as halves, in the place of P.
  __device__ __forceinline__ void differentiate(Halves& h, const Gradients& dp,
                                                const QueryStats& stats, const OctaveStats& octave,
                                                const float (&v_scale)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 queries
      const float4 slope = *reinterpret_cast<const float4*>(stats.slope + 16 * i + lane % 4 * 4),
                   offset = *reinterpret_cast<const float4*>(octave.offset + 16 * i + lane % 4 * 4);
      const float a[4] = {slope.x, slope.y, slope.z, slope.w},
                  b[4] = {offset.x, offset.y, offset.z, offset.w};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = 2 * i + c;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float y[2];
#pragma unroll
          for (int e = 0; e < 2; ++e)
            y[e] = fmaf(dp[4 * j + 2 * r + e], a[2 * c + e] * v_scale[r], b[2 * c + e]);
          h[2 * j + r] = arch::half2_mul(h[2 * j + r], arch::half2_of(y[0], y[1]));
        }
      }
    }
  }

  /// Codes of so many slabs, one scale per key.
  template <arch::Bytes kCode, int kCount>
  __device__ __forceinline__ RowScales quantize(uint32_t* codes, const Halves* h) const {
    constexpr bool kSigned = kCode == arch::Bytes::s8;
    uint32_t most[2] = {0, 0};
    const auto magnitude = [](uint32_t x) { return kSigned ? arch::half2_abs(x) : x; };
#pragma unroll
    for (int slab = 0; slab < kCount; ++slab)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          most[r] = arch::half2_max(arch::half2_max(most[r], magnitude(h[slab][4 * i + r])),
                                    magnitude(h[slab][4 * i + 2 + r]));
    const RowScales scales = row_scales < kSigned ? 127 : 255 > (row_tops(most[0], most[1]));
#pragma unroll
    for (int slab = 0; slab < kCount; ++slab)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          codes[8 * slab + 2 * i + r] = arch::half2_codes<kCode>(
              h[slab][4 * i + r], h[slab][4 * i + 2 + r], scales.factor[r]);
    return scales;
  }

  /// Hands dS to the warpgroup of dQ, turned around: rows are queries there.
  __device__ __forceinline__ void hand_over(const Halves& h, int slab) const {
    const typename Plan::Slab of{tile.number * kSlabs + static_cast<uint32_t>(slab)};
    const uint32_t row = lane % 8 + (lane >> 4) * 8,
                   to = arch::shared_address(shared.ds[of.place()][warpgroup]) + row * 128 +
                        ((warp * 2 + (lane >> 3) % 2 ^ lane % 8) << 4);
    wait_until_empty(shared.ds_empty, of);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      arch::stmatrix_x4_trans(to + static_cast<uint32_t>(i) * 16 * 128, h[4 * i], h[4 * i + 1],
                              h[4 * i + 2], h[4 * i + 3]);
    __syncwarp();
    if (lane == 0) arrive_at(shared.ds_full, of);
  }

  __device__ __forceinline__ void wait_for_back() const { wait_for(shared.back_full, tile); }
  /// acc = codes·(64 channels of a transposed operand), over so many slabs of the tile from `slab`
  /// on; only issued.
  template <arch::Bytes kCode, int kCount>
  __device__ __forceinline__ void issue_product(int (&acc)[32], const uint32_t* codes,
                                                Operand<kSlab> operand, int part, int slab) const {
    arch::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2 * kCount; ++step) {
      const uint64_t b = operand.from_row((slab + step / 2) * D + part * 64).step(step % 2);
      if constexpr (kCode == arch::Bytes::u8)
        arch::wgmma_u8(acc, codes + 4 * step, b, step > 0);
      else
        arch::wgmma_s8(acc, codes + 4 * step, b, step > 0);
    }
    arch::wgmma_commit();
  }
  __device__ __forceinline__ static void add(float (&sums)[D / 2], int part, const int (&acc)[32],
                                             const float (&unit)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      sums[part * 32 + i] =
          fmaf(static_cast<float>(acc[i]), unit[(i & 2) / 2], sums[part * 32 + i]);
  }

  struct Sums {
    float dv[D / 2], dk[D / 2];
  };

  /// dV of a tile, or dK of a slab, as integers and of 64 channels; only issued.
  __device__ __forceinline__ void issue_values(int (&acc)[32], Codes& p8, int part) const {
    issue_product<arch::Bytes::u8, kSlabs>(acc, p8, do8t(), part, 0);
  }
  __device__ __forceinline__ void issue_keys(int (&acc)[32], SlabCodes& ds8, int part,
                                             int slab) const {
    issue_product<arch::Bytes::s8, 1>(acc, ds8, q8t(), part, slab);
  }
  /// Codes of dS of a slab for dK, and what they are worth. unit: of dS.
  __device__ __forceinline__ void quantize_for_keys(SlabCodes& ds8, float (&units)[2],
                                                    const Halves& h, float unit) const {
    const RowScales scales = quantize<arch::Bytes::s8, 1>(ds8, &h);
    units[0] = scales.unit[0] * unit, units[1] = scales.unit[1] * unit;
  }

  /// One tile of queries, in the steps of docs/kernels/sm90.md. `s` holds its scores, and then
  /// those of the next tile.
  template <bool kMasked>
  __device__ __forceinline__ void visit(Sums& sums, AllScores& s, const float (&v_scale)[2],
                                        int query, bool more) {
    AllHalves h;
    Codes p8;
    Gradients dp;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      // 1. dP = V8·dOᵀ. With two slabs it takes the registers that the first one's scores leave.
      if (slab == kSlabs - 1) issue_gradients(dp, 0);
      // 2. P, and its codes below.
      exponentials<kMasked>(h[slab], s[slab], slab, query + slab * kSlab);
    }
    const RowScales p_scales = quantize<arch::Bytes::u8, kSlabs>(p8, h);
    arch::wgmma_wait<0>();
    float dv_units[2], dk_units[2], dk_unit;
    SlabCodes ds8;
    int(&acc)[32] = s[0];  // what is multiplied between two slabs takes the place of scores
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      arch::settle(dp);
      const float v[2] = {kKeepsValueScales ? v_scale[0] : value_scale_of(0),
                          kKeepsValueScales ? v_scale[1] : value_scale_of(1)};
      // 3. dS = P·(dP - D).
      differentiate(h[slab], dp, stats_of(slab), octave_stats_of(slab), v);
      if constexpr (kMasked) hide(h[slab], query + slab * kSlab);  // again: 0·NaN is not 0
      if (slab == 0) {  // all slabs of a tile have the same units
        const float dv_unit = stats_of(0).dv_unit;
        dv_units[0] = p_scales.unit[0] * dv_unit, dv_units[1] = p_scales.unit[1] * dv_unit;
        dk_unit = stats_of(0).ds_unit * kLn2;
      }
      // 4. dS to the warpgroup of dQ.
      hand_over(h[slab], slab);
      if (slab + 1 < kSlabs) {
        // 6. of the tile: dV += P8·dO8, multiplied and added up while dP of the next slab (1.) is
        // made and codes of dS (5.).
        wait_for_back();
        arch::settle(p8);
        issue_values(acc, p8, 0);
        issue_gradients(dp, slab + 1);
        quantize_for_keys(ds8, dk_units, h[slab], dk_unit);
        arch::wgmma_wait<1>();
        arch::settle(acc), arch::settle(p8);
        add(sums.dv, 0, acc, dv_units);
        arch::settle(acc), arch::settle(ds8);
        // 6. dK += dS8·Q8 of this slab, while dS of the next is made.
        issue_keys(acc, ds8, 0, slab);
        arch::wgmma_wait<1>();
      }
    }
    if constexpr (kSlabs == 2) {
      arch::wgmma_wait<0>();
      arch::settle(acc), arch::settle(ds8);
      add(sums.dk, 0, acc, dk_units);
    }
    // 5. to 7. of the last slab.
    finish(sums, s, h[kSlabs - 1], p8, dv_units, dk_unit, more);
    tile = tile.next();
    arch::wgmma_wait<0>();
#pragma unroll
    for (Scores& of_slab : s) arch::settle(of_slab);
  }

  /// The products of a tile that are left: dK of its last slab, and with one slab dV. The next
  /// scores are issued with the last of them, and multiplied while its sums are added up.
  __device__ __forceinline__ void finish(Sums& sums, AllScores& s, const Halves& h, Codes& p8,
                                         const float (&dv_units)[2], float dk_unit, bool more) {
    SlabCodes ds8;
    float dk_units[2];
    quantize_for_keys(ds8, dk_units, h, dk_unit);  // 5.
    if constexpr (kSlabs == 1) {
      wait_for_back();
      arch::settle(p8);
    }
    arch::settle(ds8);
    constexpr int kParts = D / 64, kFirst = kSlabs == 1 ? 0 : kParts, kLast = 2 * kParts - 1;
#pragma unroll
    for (int part = kFirst; part <= kLast; ++part) {
      int acc[32];
      if (part < kParts)
        issue_values(acc, p8, part);
      else
        issue_keys(acc, ds8, part - kParts, kSlabs - 1);
      if (part == kLast) {
        issue_next_scores(s, more);  // 7. S of the next tile
        arch::wgmma_wait<1>();
      } else {
        arch::wgmma_wait<0>();
      }
      arch::settle(acc);
      if (part < kParts)
        add(sums.dv, part, acc, dv_units);
      else
        add(sums.dk, part - kParts, acc, dk_units);
    }
    arch::settle(p8), arch::settle(ds8);
  }

  __device__ void run() {
    const Walk& w = shared.walk;
    Sums sums;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) sums.dv[i] = sums.dk[i] = 0.0f;
    if (w.queries > 0) {
      AllScores s;
      widen_values<T, D>(shared.v16 + warpgroup * 64 * 128,
                         p.v8 + static_cast<int64_t>(w.key_row + warpgroup * 64) * D,
                         warp * 32 + lane);
      share_with_products(meeting_of(warpgroup));
      arch::barrier_wait(arch::shared_address(&shared.keys_full), 0);
      const float v_scale[2] = {value_scale_of(0), value_scale_of(1)};
      // Half a step apart, the consumers ask for products and for exponentials in turn.
      if (warpgroup > 0) {
        const long long start = clock64();
        while (clock64() - start < kOffset) {
        }
      }
      wait_for(shared.front_full, tile);
      issue_scores(s, tile);
      arch::wgmma_wait<0>();
#pragma unroll
      for (Scores& of_slab : s) arch::settle(of_slab);
      int left = w.queries / kQueries, query = w.first;
#pragma unroll 1
      while (left > 0) {
        // Tiles that need no mask have a loop of their own.
        const int whole = min(w.whole_tiles(query, kQueries), left);
#pragma unroll 1
        for (const int end = left - whole; left > end; --left)
          visit<false>(sums, s, v_scale, 0, left > 1);
        query += whole * kQueries;
        if (query >= w.end) query = w.first;
        if (left > 0 && w.whole_tiles(query, kQueries) == 0) {
          visit<true>(sums, s, v_scale, query, left > 1);
          --left, query += kQueries;
          if (query >= w.end) query = w.first;
        }
      }
    }
    // A part has no results yet. It comes this way nevertheless: if a branch led around the first
    // use of the sums, the loops above would spill.
    store<T, D>(sums.dv, p.dv, p.dv_chunks, w, first_key(), lane, 0, w.parts == 1);
    if (w.parts > 1) {
      if (!add_parts<D>(sums.dv, sums.dk, p, w, warpgroup, warp * 32 + lane, shared.is_last))
        return;
      store<T, D>(sums.dv, p.dv, p.dv_chunks, w, first_key(), lane, 0, true);
    }
    store<T, D>(sums.dk, p.dk, p.dk_chunks, w, first_key(), lane, p.rotation, true);
  }

  static constexpr int kOffset = 1500;  // cycles
  static constexpr float kLn2 = 0.69314718055994530942f;
};

}  // namespace sagebwd::cuda::sm90::bwd
