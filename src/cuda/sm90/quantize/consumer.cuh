// SPDX-License-Identifier: Apache-2.0
// The consumers: codes of a block of tokens, from the largest magnitude of each.
//
//   rows in shared memory → product → values, of K and V - centre → scales → codes → rows in the
//   workspace and in the caller's memory; those of V transposed, through shared memory
#pragma once

#include <type_traits>

#include "cuda/sm90/codes.cuh"
#include "cuda/sm90/quantize/job.h"
#include "cuda/sm90/quantize/values.cuh"
#include "cuda/tuned/exact_scale.cuh"
#include "cuda/tuned/transposed.cuh"
#include "sagebwd/codes.h"

namespace sagebwd::cuda::sm90::codes {

using tuned::kZeroScale, tuned::word_at;

template <typename T, int D>
struct Consumer {
  using S = Shape<D>;
  using Plan = SharedPlan<T, D>;
  using Block = Values<T, D>;

  const CodesJob& job;
  Plan& shared;
  uint32_t memory;  // the place of the shared memory (arch::place_of)
  Ring<kStages> stage{0};
  Ring<kSlots> slot{0};

  __device__ const Piece& piece() const { return shared.piece[slot.place()]; }
  __device__ uint32_t stage_place() const {
    return memory + arch::places(offsetof(Plan, stage)) +
           static_cast<uint32_t>(stage.place()) * arch::places(sizeof(typename Plan::Stage));
  }

  __device__ void wait() const { wait_for(shared.full, stage); }
  /// The stage may be filled again.
  __device__ void release() const {
    __syncwarp();
    if (arch::thread_index() % 32 == 0) arrive_at(shared.empty, stage);
  }
  __device__ void advance() { stage.advance(), slot.advance(); }

  __device__ void run() {
    for (;; advance()) {
      wait();
      const Kind kind = piece().kind;
      if (kind == Kind::none) return;
      Block b;
      const uint32_t matrices = memory + arch::places(offsetof(Plan, matrices));
      if (kind != Kind::values && job.rotation > 0)
        b.template multiply<true>(stage_place(), matrices);
      else
        b.template multiply<false>(stage_place(), matrices);
      if (kind != Kind::values) release();
      wait_for(shared.centre_full, slot);  // also who needs none: every phase is waited for
      if (kind == Kind::keys)
        keys(b);
      else if (kind == Kind::values)
        values(b);
      else
        queries(b);
    }
  }

  __device__ bool saves() const { return job.saved.q8 != nullptr; }

  /// The largest number of all consumers, as bits: their order is that of magnitudes, NaN on top.
  __device__ float share_top(int round, float top) const {
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(top));
    const uint32_t thread = arch::thread_index();
    if (thread % 32 == 0) shared.top[slot.place()][round][thread / 32] = most;
    meet<D>();
    const auto* tops = reinterpret_cast<const uint4*>(shared.top[slot.place()][round]);
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < S::kWarps / 4; ++i) {
      const uint4 four = tops[i];
      all = max(all, max(max(four.x, four.y), max(four.z, four.w)));
    }
    return __uint_as_float(all);
  }
  /// What a block of K or V has: the largest magnitude of its tokens without those that hold NaN or
  /// Inf, and whether there are such.
  struct Largest {
    float top;
    bool poisoned;
  };
  __device__ Largest largest(float top) const {
    const float most = share_top(0, top);
    if (numerics::is_finite(most)) return {most, false};
    return {share_top(1, numerics::is_finite(top) ? top : 0.0f), true};
  }

  /// Calls put(i, panel, the lane's 16 codes) for each row i of the thread. `inverse`: the factor
  /// of the token that this lane owns; 0: its codes are 0.
  template <typename Put>
  __device__ __forceinline__ void make_codes(Block& b, float inverse, Put put) const {
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      const float factor = __shfl_sync(0xffffffffu, inverse, i, 4);
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel) put(i, panel, b.codes(i, panel, factor));
    }
  }
  /// In the second-level cache codes are the first to make room.
  __device__ static void write_once(int8_t* to, uint4 words) {
    __stcs(reinterpret_cast<uint4*>(to), words);
  }

  /// Writes codes of Q or K.
  __device__ __forceinline__ void write_codes(Block& b, float inverse, int8_t* rows,
                                              int8_t* saved) const {
    const Place<D>& place = b.place;
    const uint32_t at = place.first_row() * D + place.channel(0);
    if (rows != nullptr) rows += piece().row * D + at;
    if (saved != nullptr) saved += piece().saved_row * D + at;
    const int left = piece().left - static_cast<int>(place.first_row());
    make_codes(b, inverse, [&](int i, int panel, uint4 words) {
      const int row = i / 2 * 64 + i % 2 * 8, offset = row * D + panel * 64;
      if (rows != nullptr) write_once(rows + offset, words);
      if (saved != nullptr && row < left) write_once(saved + offset, words);
    });
  }

  /// Where a number of a token is among those of its block, in the order of tile::permuted.
  __device__ static uint32_t permuted_place(uint32_t row) {
    return (row & ~15u) + static_cast<uint32_t>(tile::place_of(static_cast<int>(row % 16)));
  }

  /// Whether a key of this warp is poisoned. Each warp has a part of its own, so that none waits.
  __device__ static void note_poison(uint32_t (&poisoned)[2], bool mine) {
    using Part = std::conditional_t<S::kWarps == 8, uint8_t, uint16_t>;
    static_assert(S::kWarps * sizeof(Part) == sizeof(poisoned));
    const bool any = __any_sync(0xffffffffu, mine);
    const uint32_t thread = arch::thread_index();
    if (thread % 32 == 0) reinterpret_cast<Part*>(poisoned)[thread / 32] = any;
  }
  __device__ void keys(Block& b) const {
    const Place<D>& place = b.place;
    b.subtract(shared.centre[slot.place()], job.rotation > 0 ? numerics::rotation_unit(D) : 1.0f);
    const uint32_t row = place.own_row();
    const bool real = static_cast<int>(row) < piece().left;
    const float found = b.own_top(), scale = numerics::key_scale_of(real ? found : 0.0f);
    const bool poisoned = scale != scale;
    if (job.numbers != nullptr) {
      KeyNumbers& to = job.numbers[piece().row / kBlock];
      note_poison(to.block.k_poisoned, poisoned);
      if (place.owns())
        to.k[permuted_place(row)] = poisoned ? kPoisonedScale : scale == 0.0f ? kZeroScale : scale;
    }
    if (place.owns() && saves() && real) job.saved.k_scale[piece().saved_row + row] = scale;
    write_codes(b, numerics::inverse_of(scale), job.k8, saves() ? job.saved.k8 : nullptr);
  }

  __device__ void values(Block& b) const {
    const Place<D>& place = b.place;
    b.subtract(shared.centre[slot.place()], 1.0f);
    const uint32_t row = place.own_row();
    const bool real = static_cast<int>(row) < piece().left;
    const float found = b.own_top(), top = real ? found : 0.0f;
    const Largest of = largest(top);  // also, nobody reads the stage any more
    const float most = numerics::lone_value_scale(of.top), scale = numerics::lone_value_scale(top);
    if (job.numbers != nullptr) {
      KeyNumbers& to = job.numbers[piece().row / kBlock];
      if (arch::thread_index() == 0) to.block.v = most, to.block.v_poisoned = of.poisoned;
      if (place.owns()) {
        const uint32_t at = permuted_place(row);
        const float counted = scale != scale ? 0.0f : scale;
        to.v[at] = counted;
        to.share[at] =
            __half_as_ushort(__float2half_rn(value_share(counted, arch::reciprocal_approx(most))));
      }
    }
    if (place.owns() && saves() && real) job.saved.v_scale[piece().saved_row + row] = scale;
    // Codes take the place of the tokens.
    auto* transposed = reinterpret_cast<uint32_t*>(&shared.stage[stage.place()]);
    static_assert(kBlock * D <= sizeof(typename Plan::Stage));
    int8_t* saved = saves() ? job.saved.v8 + piece().saved_row * D + place.channel(0) : nullptr;
    const int left = piece().left;
    make_codes(b, real ? numerics::inverse_of(scale) : 0.0f, [&](int i, int panel, uint4 words) {
      const uint32_t at = place.row(i);
      *reinterpret_cast<uint4*>(transposed + word_at<D>(at, place.channel(panel) / 4)) = words;
      if (saved != nullptr && static_cast<int>(at) < left)
        write_once(saved + at * D + panel * 64, words);
    });
    if (job.v8t != nullptr) {
      meet<D>();
      tuned::write_transposed<D, false>(job.v8t, piece().row, transposed, arch::thread_index());
    }
    arch::shared_writes_done();
    release();
  }

  __device__ void queries(Block& b) const {
    const Place<D>& place = b.place;
    const float unit = job.rotation > 0 ? numerics::rotation_unit(D) : 1.0f;
    const uint32_t row = place.own_row();
    const bool real = static_cast<int>(row) < piece().left;
    const float top = b.own_top() * unit, scale = numerics::scale_of(real ? top : 0.0f),
                inverse = real ? numerics::inverse_of(scale) * unit : 0.0f;
    if (place.owns()) {
      if (job.logit_factor != nullptr) {
        // A query of zeros has logits 0 with any factor. A positive one keeps masked logits at
        // -inf, and next to a small one the start of the integer sums vanishes.
        const float factor = scale * (job.logit_scale * numerics::kLog2e);
        job.logit_factor[piece().row + row] = factor == 0.0f ? kZeroScale : factor;
      }
      if (saves() && real) job.saved.q_scale[piece().saved_row + row] = scale;
    }
    write_codes(b, inverse, job.q8, saves() ? job.saved.q8 : nullptr);
  }
};

}  // namespace sagebwd::cuda::sm90::codes
