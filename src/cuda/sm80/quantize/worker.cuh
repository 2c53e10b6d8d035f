// SPDX-License-Identifier: Apache-2.0
// A thread block at a piece of work of the operand kernel: where things come from and go to, and
// the pieces that are keys or values.
#pragma once

#include "cuda/arch/target.cuh"
#include "cuda/sm80/quantize/lone_keys.cuh"
#include "cuda/sm80/quantize/mean.cuh"
#include "cuda/sm80/quantize/token_block.cuh"
#include "cuda/tuned/exact_scale.cuh"
#include "cuda/tuned/items.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm80 {

using tuned::exact_scale, tuned::kZeroScale, tuned::Kind;

template <typename T, int D, bool kBackward, bool kPaper>
struct Worker {
  using Block = TokenBlock<T, D>;
  using Mean = MeanBlock<T, D>;
  static constexpr int kSteps = Block::kSteps;
  // Thread blocks on a multiprocessor. With one more the backward of `paper` would spill, and at d
  // 64 other targets than Hopper.
  static constexpr int kResident =
      kPaper && kBackward ? (D == 64 ? 2 : 1) : (D == 64 && arch::kIsHopper ? 3 : 2);

  struct Shared {
    Stage<D> stage;  // of K, V or Q
    union {
      typename Block::Shared block;
      typename Mean::Shared mean;
    };
    SignTable signs;
    Item item, next, after;  // pieces of work: this one and those behind it
    uint32_t ticket;         // the number of the one behind `after`
  };

  static_assert(arch::shared_memory_for(sizeof(Shared), kResident) <=
                arch::shared_memory_of(arch::kTarget == 800 ? 860 : arch::kTarget));

  const OperandJob& job;
  const Item& item;
  const Item& next;
  Shared& shared;

  __device__ static bool is_mean(Kind kind) { return kPaper && kind == Kind::k_mean; }

  /// Asks for what a piece of work reads of K, V or Q: a group of copies, which may be empty.
  __device__ __forceinline__ void start(Kind kind, Source from, int left) const {
    if (is_mean(kind))
      Mean::start(shared.stage, from, left, job.d);
    else if (kind == Kind::none)
      ;
    else if (reads_codes())
      Block::start_codes(shared.stage, from, left, job.d);
    else
      Block::start(shared.stage, from, left, job.d);
    arch::cp_async_commit();
  }
  __device__ static void wait_for_stage() { arch::cp_async_wait<0>(); }

  /// The row of the thread's first token in one of the caller's tensors.
  __device__ const T* row(const Strided& x, const Block& b, bool queries) const {
    return tile::row_of<const T>(
        x, item.s, item.head,
        (queries ? item.s.q_begin : item.s.k_begin) + item.first + b.first_token());
  }
  /// Whether codes come from the caller's memory, or go there. Those of `paper` never do.
  __device__ bool reads_codes() const { return kBackward && !kPaper && job.saved.q8 != nullptr; }
  __device__ bool saves_codes() const { return !kBackward && !kPaper && job.saved.q8 != nullptr; }
  /// The thread's first token in that memory, heads included.
  __device__ int64_t saved_row(const Block& b, bool queries) const {
    const int64_t sequence = queries ? item.s.batch * job.seq.nq + item.s.q_begin
                                     : item.s.batch * job.seq.nk + item.s.k_begin;
    return item.head * (queries ? job.saved.queries : job.saved.keys) + sequence + item.first +
           b.first_token();
  }
  /// The place of the scale there of the key that this lane owns.
  __device__ float& saved_k_scale(const Block& b) const {
    return job.saved.k_scale[saved_row(b, false) + b.own()];
  }
  using Targets = typename Block::Targets;
  __device__ Targets with_saved(Targets to, int8_t* saved, int64_t row) const {
    if (saves_codes()) to.saved = saved + row * job.d, to.d = job.d;
    return to;
  }

  /// Waits for the mean of K of a key head, as it was turned. It is zero if there is none.
  __device__ void load_k_mean(Block& b, int kv_head) const {
#pragma unroll
    for (int part = 0; part < Block::kParts; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) b.mean[part][e] = 0.0f;
    if (job.k_mean.mean == nullptr || item.s.nk == 0) return;
    wait_for_mean(b.mean, job.k_mean.turned +
                              (static_cast<int64_t>(item.s.index) * job.hk + kv_head) * D +
                              b.channel(0));
  }

  /// Finds the scales of Q or dO: per `tokens` tokens in `paper`, else per token.
  template <Values kValues>
  __device__ void measure(Block& b, int tokens) const {
    if constexpr (kPaper)
      b.template measure_shared<kValues>(tokens);
    else
      b.template measure_tokens<kValues>();
  }

  /// The scale of the key that this lane owns: `common`, or NaN where the key is poisoned.
  __device__ void write_k_scale(const Block& b, float common) const {
    common = exact_scale(common);
    if (b.owns())
      job.k_scale[b.token0() + b.own()] = {b.scale != b.scale ? b.scale : common,
                                           -tile::kMagicFloat * common};
  }

  __device__ void keys(Block& b) const {
    if constexpr (kPaper)
      tile_keys(b);
    else
      lone_keys(b);
  }

  /// The centre of the octave of a block of keys or values.
  __device__ LaneCentre<D> centre_of(const Block& b, const tuned::Centres& centres) const {
    const int octave = numerics::octave_of_block(item.first / kBlock);
    return {centres,
            centres.row(item.head, item.s.k_pad / kBlock, numerics::first_block_of(octave)),
            b.channel(0), job.d};
  }

  /// Keys whose codes and scales depend on the key and its centre alone.
  __device__ void lone_keys(Block& b) const {
    const Targets to{.rows = job.k8, .transpose = kBackward};
    const LaneCentre<D> centre = centre_of(b, job.centres);
    typename Block::Words codes;
    if (reads_codes()) {
      b.get_codes(codes);
      b.scale = b.own_is_real() ? saved_k_scale(b) : 0.0f;
      b.put_all(to, codes);
    } else {
      b.flip(shared.signs);
      b.template make<false>();
      if (job.rotation > 0) b.template rotate<false>(job.rotation);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) subtract(b, step, centre);
      b.measure_keys();
      if (saves_codes() && b.owns() && b.own_is_real()) saved_k_scale(b) = b.scale;
      b.template write_codes<Values::made>(with_saved(to, job.saved.k8, saved_row(b, false)));
      if constexpr (kBackward) b.take_back(codes);
    }
    write_k_scale(b, b.scale);
    if constexpr (kBackward) dq_keys(b, codes, centre);
  }

  /// The same keys as dQ needs them (DqKeys), transposed. Poisoned ones are zero.
  __device__ void dq_keys(Block& b, const typename Block::Words& codes,
                          const LaneCentre<D>& centre) const {
    const float* mean = job.dq_keys.turned +
                        (static_cast<int64_t>(item.s.index) * job.hk + item.head) * D +
                        b.channel(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float scale = __shfl_sync(0xffffffffu, b.scale, step, Block::kLanes);
      const bool poisoned = scale != scale;
      decode(b, step, codes, scale, centre);
#pragma unroll
      for (int part = 0; part < Block::kParts; ++part) {
        const auto* at = reinterpret_cast<const float4*>(mean + part * 32);
        const float4 low = at[0], high = at[1];
        const float middle[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& x = b.made[step][part][e];
          x = poisoned ? 0.0f : x - middle[e];
        }
      }
    }
    const float common = b.template measure_shared<Values::made>(job.k_tokens).scale;
    const int64_t first = b.token0();
    if (first % kSlab == 0 && b.member() == 0) job.dq_keys.scale[first / kSlab] = common;
    b.template write_codes<Values::made>({.transpose = true});
    __syncthreads();
    b.template write_transposed<true>(job.k8t);
  }

  /// Keys in `paper`, without their mean, of which those of a tile share a scale.
  __device__ void tile_keys(Block& b) const {
    b.flip(shared.signs);
    load_k_mean(b, item.head);
    b.template make<true>();
    if (job.rotation > 0) b.rotate(job.rotation);
    write_k_scale(b, b.template measure_shared<Values::made>(job.k_tokens).scale);
    b.template write_codes<Values::made>({.rows = job.k8, .transpose = kBackward});
    if constexpr (kBackward) {
      __syncthreads();
      b.template write_transposed<true>(job.k8t);
    }
  }

  __device__ void values(Block& b) const {
    if (reads_codes()) {
      typename Block::Words codes;
      b.get_codes(codes);
      const float scale = b.own_is_real() ? job.saved.v_scale[saved_row(b, false) + b.own()] : 1.0f;
      if (b.owns()) job.v_scale[b.token0() + b.own()] = scale;
      b.write_codes_16(job.v16, codes);
    } else if (!kPaper && job.folds_v) {
      lone_values(b);
    } else if constexpr (kBackward) {
      b.write_loaded(job.v16);
    } else {
      tile_values(b);
    }
  }

  /// Values with a scale of their own, which depend on the value and its centre alone. Poisoned
  /// ones have codes 0: rows that see them become NaN in the end.
  __device__ void lone_values(Block& b) const {
    b.template make<false>();
    const LaneCentre<D> centre = centre_of(b, job.value_centres);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) subtract(b, step, centre);
    b.measure_lone_values();
    if constexpr (kBackward) {
      if (b.owns()) job.v_scale[b.token0() + b.own()] = b.scale;
      b.write_codes_16(job.v16);
    } else {
      if (saves_codes() && b.owns() && b.own_is_real())
        job.saved.v_scale[saved_row(b, false) + b.own()] = b.scale;
      write_folded(b, b.scale == b.scale ? b.scale : 1.0f);
      if (job.leads) b.write_codes_16(job.v16);
      b.template write_codes<Values::made>(
          with_saved({.transpose = true}, job.saved.v8, saved_row(b, false)));
      const bool poisoned = __syncthreads_or(b.scale != b.scale);
      if (threadIdx.x == 0)
        job.v_tile_scale[b.row0 / kBlock] = poisoned ? __int_as_float(0x7fffffff) : 1.0f;
      if (poisoned && b.owns()) job.v_scale[b.token0() + b.own()] = b.scale;
      b.template write_transposed<false>(job.v8t);
    }
  }

  /// Values in the forward of `paper`, of which those of a tile share a scale, and where O is
  /// lifted out of INT8.
  __device__ void tile_values(Block& b) const {
    const typename Block::SharedScale of_tile =
        b.template measure_shared<Values::loaded>(job.tile_k);
    const int64_t first = b.token0();
    if (first % job.tile_k == 0 && b.member() == 0)
      job.v_tile_scale[first / job.tile_k] =
          of_tile.poisoned ? __int_as_float(0x7fffffff) : of_tile.scale;
    if (job.folded != nullptr) write_folded(b, 1.0f);
    b.template write_codes<Values::loaded>({.transpose = true});
    __syncthreads();
    b.template write_transposed<false>(job.v8t);
    if (of_tile.poisoned || job.v16_is_v) b.write_loaded(job.v16);
  }

  /// The scale of the token that this lane owns, as P is multiplied by it.
  __device__ void write_folded(const Block& b, float scale) const {
    if (!b.owns()) return;
    const int token = b.first_token() + static_cast<int>(b.own());
    const int place = (token & ~15) + tile::place_of(token);
    FoldedScales& to = job.folded[b.row0 / kBlock];
    to.exponent[place] = log2f(scale) + FoldedScales::kBias;
    to.inverse[place] = arch::reciprocal_approx(scale);
  }
};

}  // namespace sagebwd::cuda::sm80
