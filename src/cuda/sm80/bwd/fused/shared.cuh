// SPDX-License-Identifier: Apache-2.0
// The shared memory of the fused backward: what lies where, and which part of it a lane reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/arch/shared_memory.cuh"
#include "cuda/sm80/bwd/fused/config.cuh"
#include "cuda/sm80/bwd/fused/walk.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/shared_tile.cuh"

namespace sagebwd::cuda::sm80::fused_backward {

// What a lane holds. Its keys are rows g and g + 8 of each block of 16, where g = lane / 4; its
// queries are columns 2t and 2t + 1 of each block of 8, where t = lane % 4.
using Scores = float[kKeyBlocks][kQueryBlocks][4];
using PerKey = float[kKeyBlocks][2];  // one number for each of the lane's four keys

/// What the warps of a thread block share.
template <Config kConfig>
struct SharedPlan {
  static constexpr int D = kConfig.d, kTileQ = kConfig.tile_q(), kTileK = kConfig.tile_k();
  static_assert(kConfig.valid());
  struct Front {  // what S and dP read of a query tile
    alignas(128) uint8_t q8[kTileQ * D];
    alignas(128) uint8_t do16[kTileQ * D * 2];
    alignas(16) QueryExponent exponent[kTileQ];
    alignas(16) QueryGradient gradient[kTileQ];
  };
  struct Back {  // what dV and dK read of it
    alignas(128) uint8_t q8t[kTileQ * D];
    alignas(128) uint8_t do8t[kTileQ * D];
  };
  // Numbers of keys and queries lie in the order of place_of_row.
  struct Maxima {  // bits of FP32 scales: positive floats have the order of their bits
    uint32_t p[kTileK], ds[kTileK], query[kTileQ];
  };
  struct Keys {
    alignas(128) uint8_t k8[kTileK * D];
    alignas(128) uint8_t v16[kTileK * D * 2];
  };
  // A operands of 512 bytes, one per warp and block of 16 rows: keys in p and ds, queries in query.
  static constexpr int kOperands = kConfig.warps() * 2;
  struct Codes {
    uint4 p[kOperands][32], ds[kOperands][32], query[kOperands][32];
  };
  struct KeysAndCodes {
    Keys keys;
    Codes codes;
  };
  union KeysThenCodes {  // once the warps hold the keys in registers
    Keys keys;
    Codes codes;
  };
  struct KeysAlone {
    Keys keys;
  };
  struct Ring {
    Front front[kConfig.fronts];
    Back back[kConfig.backs];
  };
  struct BackAndCodes {
    Back back;
    Codes codes;
  };
  union OnePlace {  // once S and dP have read the front
    Front front;
    BackAndCodes after;
  };
  std::conditional_t<kConfig.one_place, KeysAlone,
                     std::conditional_t<kConfig.holds_keys, KeysThenCodes, KeysAndCodes>>
      both;
  alignas(128) uint8_t k8t[kTileK * D];
  std::conditional_t<kConfig.one_place, OnePlace, Ring> tiles;
  alignas(16) float k_scale[kTileK];
  alignas(16) float v_scale[kTileK];  // of the codes of V; not in `paper`
  alignas(16) Maxima maxima[2];       // tiles take turns
  struct Nothing {};
  struct Starts {  // what has to come off dV and dK again (products.cuh)
    alignas(16) float places[2][2 * kTileK];
  };
  std::conditional_t<kConfig.starts_stay_on, Starts, Nothing> starts;
  alignas(16) WalkOf<kConfig> walk;
  struct ListedTiles {  // those that are worked on and loaded, and the one after them
    alignas(8) Tile ring[4];
    const Tile* end;  // of the list
  };
  std::conditional_t<kConfig.lists(), ListedTiles, Nothing> listed;
  struct DqKeys {                           // not in `paper`
    alignas(16) float query_scale[kTileQ];  // of the queries of a tile, times `scale`
    float scale;                            // of dQ's keys
    // What all queries have for the octave of these keys: exponents, or with a cap the logits of
    // its centre; and gradients.
    std::conditional_t<kConfig.capped(), const float*, const QueryExponent*> of_octave;
    const QueryGradient* gradients;
  };
  std::conditional_t<kConfig.has_dq_keys(), DqKeys, Nothing> dq_keys;
  // `paper`: the tile's scale of P and its scale of dS, four times each, as a lane reads them.
  // Tiles take turns here too.
  alignas(16) uint32_t tile_scales[2][8];
  // What kGeneral needs; tiles take turns in the row sums.
  struct Extras {
    uint32_t turn[kConfig.warps()];
    float row_sums[2][kConfig.key_strips][kTileQ];
  };
  struct CappedExtras {
    uint32_t turn[kConfig.warps()];
    float row_sums[2][kConfig.key_strips][kTileQ];
    alignas(16) float centre_logit[kConfig.fronts][kTileQ];  // part of the front
  };
  struct DqDither {  // dither_dq.cuh
    uint32_t terms[kConfig.threads()], uniforms[32];
  };
  std::conditional_t<!kConfig.general(), Nothing,
                     std::conditional_t<kConfig.capped(), CappedExtras, Extras>>
      extras;
  std::conditional_t<kConfig.dithers_dq(), DqDither, Nothing> dq_dither;
};

/// What lies at an address in shared memory.
template <typename V>
__device__ V& at(uint32_t address) {
  return *static_cast<V*>(arch::shared_pointer(address, alignof(V)));
}

/// The place of a key's or query's number among those of its tile: the four of 32 that are 8 apart
/// lie together, because one lane needs them.
__device__ inline uint32_t place_of_row(uint32_t row) {
  return (row & ~31u) + (row & 7) * 4 + (row >> 3 & 3);
}

__device__ inline void get_four(PerKey& x, uint32_t from) {
  const float4 v = at<float4>(from);
  x[0][0] = v.x, x[0][1] = v.y, x[1][0] = v.z, x[1][1] = v.w;
}

/// Who a thread is, what it was given, and where it finds things. Offsets are relative to the
/// SharedPlan.
template <Config kConfig>
struct Thread {
  using Plan = SharedPlan<kConfig>;
  using Front = typename Plan::Front;
  using Back = typename Plan::Back;
  static constexpr int D = kConfig.d;
  static constexpr bool kWhole = kCode<kConfig>.whole_addresses;

  uint32_t shared;  // address of the SharedPlan
  uint32_t index;   // in the thread block
  // The lane's part of fragment addresses: of K and V, of Q and dO, and of transposed tiles. Whole
  // addresses hold all but a constant.
  uint32_t key8, query8, key16, query16, transposed;
  const BackwardParams& p;

  __device__ Thread(const BackwardParams& params, uint8_t* memory)
      : shared(arch::shared_address(memory)), p(params) {
    // Shuffles, because the compiler would read slow special registers again and again.
    index = __shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32));
    shared = __shfl_sync(0xffffffffu, shared, 0);
    key8 = tile::a_lane<D>(lane()), query8 = tile::b_lane<D>(lane());
    key16 = tile::a_lane<2 * D>(lane()), query16 = tile::b_lane<2 * D>(lane());
    if constexpr (kWhole) {
      key8 += first_key8(), query8 += first_query8();
      key16 += first_key16(), query16 += first_query16();
    }
    transposed = tile::swizzled<kSlab>(lane() & 7, lane() >> 3);
  }

  /// Called for every tile. ptxas would compute what follows from these numbers before the loop and
  /// push accumulators out of the registers for it. It does not know that `zero` stays what it is.
  __device__ void renew_addresses() {
    constexpr CodeGeneration kChoices = kCode<kConfig>;
    const uint32_t zero = walk().zero;
    if constexpr (kChoices.renews_index) index += zero;
    if constexpr (kChoices.renews_keys) key8 += zero;
    if constexpr (kChoices.renews_transposed) transposed += zero;
    if constexpr (D == 64) {
      query8 += zero, query16 += zero;
    } else {
      const uint32_t in_tile = tile::b_lane<D>((lane() + zero) & 31);
      query8 = kWhole ? first_query8() + in_tile : in_tile;
      // The same row and chunk where rows are twice as long.
      if constexpr (!kConfig.paper()) query16 = query8 + ((query8 - (kWhole ? shared : 0)) & ~127u);
    }
  }

  __device__ uint32_t warp() const { return index / 32; }
  __device__ uint32_t lane() const { return index % 32; }
  __device__ uint32_t t() const { return index % 4; }
  __device__ uint32_t key_strip() const { return warp() / kConfig.query_strips; }
  __device__ uint32_t query_strip() const { return warp() % kConfig.query_strips; }
  __device__ uint32_t first_query() const { return query_strip() * kWarpQueries; }
  __device__ int key(int m, int r) const {
    return static_cast<int>(key_strip() * kWarpKeys + lane() / 4) + 16 * m + 8 * r;
  }

  /// Behind the first barrier.
  __device__ const WalkOf<kConfig>& walk() const {
    return at<WalkOf<kConfig>>(shared + offsetof(Plan, walk));
  }

  /// Block lists: where the tile lies behind which `left` - 1 are left.
  __device__ uint32_t listed_at(int left) const {
    return shared + static_cast<uint32_t>(offsetof(Plan, listed.ring)) + (left & 3) * sizeof(Tile);
  }

  __device__ const Tile*& list_end() const {
    return at<const Tile*>(shared + offsetof(Plan, listed.end));
  }

  __device__ float& dq_key_scale() const {
    return at<float>(shared + static_cast<uint32_t>(offsetof(Plan, dq_keys.scale)));
  }
  __device__ uint32_t dq_scales() const {
    return shared + static_cast<uint32_t>(offsetof(Plan, dq_keys.query_scale));
  }
  __device__ auto& of_octave() const {
    using Pointer = std::conditional_t<kConfig.capped(), const float*, const QueryExponent*>;
    return at<Pointer>(shared + static_cast<uint32_t>(offsetof(Plan, dq_keys.of_octave)));
  }
  __device__ const QueryGradient*& gradients() const {
    return at<const QueryGradient*>(shared +
                                    static_cast<uint32_t>(offsetof(Plan, dq_keys.gradients)));
  }

  // Offsets of a stage of the query tiles.
  __device__ static constexpr uint32_t front_at(int stage) {
    return static_cast<uint32_t>(offsetof(Plan, tiles.front) +
                                 (kConfig.fronts > 1 ? stage * sizeof(Front) : 0));
  }
  /// The logits that its queries have with the centre of the keys.
  __device__ static constexpr uint32_t centre_logits_at(int stage) {
    return static_cast<uint32_t>(offsetof(Plan, extras.centre_logit) +
                                 (kConfig.fronts > 1 ? stage * kConfig.tile_q() * 4 : 0));
  }
  __device__ static constexpr uint32_t back_at(int stage) {
    if constexpr (kConfig.one_place)
      return offsetof(Plan, tiles.after.back);
    else
      return static_cast<uint32_t>(offsetof(Plan, tiles.back) + stage * sizeof(Back));
  }

  // Fragments of contraction step k; m and n are blocks of 16 rows, `front` is front_at.
  __device__ uint32_t keys_at(int m, int k) const {
    const uint32_t at = key8 + static_cast<uint32_t>(offsetof(Plan, both.keys.k8));
    return tile::step_of(kWhole ? at : at + first_key8(), k) + m * 16 * D;
  }
  __device__ uint32_t queries_at(uint32_t front, int n, int k) const {
    const uint32_t at = query8 + front + static_cast<uint32_t>(offsetof(Front, q8));
    return tile::step_of(kWhole ? at : at + first_query8(), k) + n * 16 * D;
  }
  __device__ uint32_t values_at(int m, int k) const {
    const uint32_t at = key16 + static_cast<uint32_t>(offsetof(Plan, both.keys.v16));
    return tile::step_of(kWhole ? at : at + first_key16(), k) + m * 32 * D;
  }
  __device__ uint32_t douts_at(uint32_t front, int n, int k) const {
    const uint32_t at = query16 + front + static_cast<uint32_t>(offsetof(Front, do16));
    return tile::step_of(kWhole ? at : at + first_query16(), k) + n * 32 * D;
  }

  // Scales: one per key, query or tile.
  __device__ uint32_t maxima_at(int buffer) const {
    return shared +
           static_cast<uint32_t>(offsetof(Plan, maxima) + buffer * sizeof(typename Plan::Maxima));
  }
  __device__ uint32_t tile_scales_at(int buffer) const {
    return shared + static_cast<uint32_t>(offsetof(Plan, tile_scales) + buffer * 32);
  }
  /// The four numbers of this lane's keys, of an array that starts at `from`.
  __device__ uint32_t keys_of(uint32_t from) const {
    return from + key_strip() * 128 + lane() / 4 * 16;
  }
  /// The same for queries as rows of dQ.
  __device__ uint32_t query_rows_of(uint32_t from) const {
    return from + query_strip() * 128 + lane() / 4 * 16;
  }
  /// Read anew for every tile: registers are scarcer than loads.
  __device__ void get_key_scales(PerKey& scale) const {
    get_four(scale, keys_of(shared + offsetof(Plan, k_scale)));
  }

  /// The same for the scales of V.
  __device__ void get_value_scales(PerKey& scale) const {
    get_four(scale, keys_of(shared + offsetof(Plan, v_scale)));
  }

  // Codes as A operands. For dV and dK a contraction step is a query strip, and m a block of 16
  // keys of this warp's key strip. `codes` is one of these offsets.
  __device__ static constexpr uint32_t codes_start() {
    if constexpr (kConfig.one_place)
      return offsetof(Plan, tiles.after.codes);
    else
      return offsetof(Plan, both.codes);
  }
  using Codes = typename Plan::Codes;
  static constexpr uint32_t kPCodes = codes_start() + offsetof(Codes, p),
                            kDsCodes = codes_start() + offsetof(Codes, ds),
                            kQueryCodes = codes_start() + offsetof(Codes, query);
  __device__ uint32_t codes_at(uint32_t codes, uint32_t step, int m) const {
    return shared + codes + (m * kConfig.warps() + key_strip() * kConfig.query_strips + step) * 512;
  }
  /// For dQ a contraction step is a key strip, and j a block of 16 queries of a query strip.
  __device__ uint32_t query_codes_at(uint32_t strip, int j, int step) const {
    return shared + kQueryCodes + (j * kConfig.warps() + step * kConfig.query_strips + strip) * 512;
  }
  __device__ void get_codes(uint32_t (&a)[4], uint32_t operand) const {
    const uint4 v = at<uint4>(operand + lane() * 16);
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  }

 private:
  // Where this warp's keys and queries would start in a tile at the start of the SharedPlan.
  __device__ uint32_t first_key8() const { return shared + key_strip() * kWarpKeys * D; }
  __device__ uint32_t first_query8() const { return shared + first_query() * D; }
  __device__ uint32_t first_key16() const { return shared + key_strip() * 2 * kWarpKeys * D; }
  __device__ uint32_t first_query16() const { return shared + first_query() * 2 * D; }
};

}  // namespace sagebwd::cuda::sm80::fused_backward
