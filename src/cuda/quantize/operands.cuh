// SPDX-License-Identifier: Apache-2.0
// All operands of a call in one launch. Thread blocks take pieces of work from a list (items.cuh)
// until it is empty.
#pragma once

#include <type_traits>

#include "cuda/arch/kernel_order.cuh"
#include "cuda/arch/target.cuh"
#include "cuda/host/launch.h"
#include "cuda/quantize/items.cuh"
#include "cuda/quantize/mean.cuh"
#include "cuda/quantize/token_block.cuh"

namespace sagebwd::cuda {

/// Whose main kernels read the operands.
enum class Reader { sm80, sm90 };

/// Whether codes come from the caller's memory: sm90 has a kernel for either case, because what
/// only reads codes needs fewer registers.
enum class Codes { made, read, made_or_read };

// Scale of Q or K where all codes are zero. The backward multiplies scales into dS and divides them
// out again, so a scale must not be 0. This one is too small to change the maxima of dS.
inline constexpr float kZeroScale = 0x1p-60f;

template <typename T, int D, bool kBackward, Scheme kScheme, Reader kReader, Codes kCodes>
struct Worker {
  using Block = TokenBlock<T, D>;
  using Mean = MeanBlock<T, D>;
  static constexpr int kSteps = Block::kSteps;
  // Thread blocks on a multiprocessor. With three `paper` would spill before sm_90, and the forward
  // of `vectorwise` in FP16 on sm_120.
  static constexpr bool kTooManyRegisters =
      kScheme == Scheme::paper
          ? kBackward || arch::kTarget < 900
          : !kBackward && std::is_same_v<T, __half> && arch::kTarget / 100 == 12;
  // With two the backward of `paper` would spill.
  static constexpr bool kFarTooMany = D == 128 && kScheme == Scheme::paper && kBackward;
  static constexpr int kResident = kFarTooMany ? 1 : D == 128 || kTooManyRegisters ? 2 : 3;

  // What comes through shared memory: K, V or Q; in the backward of sm90, which has room, also dO
  // and O.
  static constexpr bool kStagesGradients = kBackward && kReader == Reader::sm90;

  struct Shared {
    Stage<D> stage[kStagesGradients ? 3 : 1];
    union {
      typename Block::Shared block;
      typename Mean::Shared mean;
    };
    SignTable signs;
    Item item[3];
  };

  static_assert(arch::shared_memory_for(sizeof(Shared), kResident) <=
                arch::shared_memory_of(arch::kTarget == 800 ? 860 : arch::kTarget));

  const OperandJob& job;
  const Item& item;
  const Item& next;
  Shared& shared;

  __device__ Block block(int64_t tokens) const {
    return Block(shared.block, item.left,
                 item.head * tokens + static_cast<int64_t>(item.block) * kBlock);
  }

  /// Codes come with their means.
  __device__ static bool is_mean(Kind kind) {
    return kCodes != Codes::read && (kind == Kind::k_mean || kind == Kind::v_mean);
  }

  /// Asks for what a piece of work reads: K, V or Q, and then the rest. Each is a group of copies,
  /// which may be empty.
  __device__ __forceinline__ void start(Kind kind, Source from, int left) const {
    if (is_mean(kind))
      Mean::start(shared.stage[0], from, left, job.d);
    else if (kind != Kind::none && reads_codes())
      Block::start_codes(shared.stage[0], from, left, job.d);
    else if (kind != Kind::none)
      Block::start(shared.stage[0], from, left, job.d);
    arch::cp_async_commit();
  }
  __device__ __forceinline__ void start_rest() const {
    if constexpr (kStagesGradients) {
      if (next.kind == Kind::queries) {
        Block::start(shared.stage[1], next.dout, next.left, job.d);
        Block::start(shared.stage[2], next.o, next.left, job.d);
      }
      arch::cp_async_commit();
    }
  }

  /// Waits for what was asked for, but for the group that was asked for last.
  __device__ static void wait_for_stage() { arch::cp_async_wait<kStagesGradients ? 1 : 0>(); }

  /// The row of the thread's first token in one of the caller's tensors.
  __device__ const T* row(const Strided& x, const Block& b, bool queries) const {
    return tile::row_of<const T>(
        x, item.s, item.head,
        (queries ? item.s.q_begin : item.s.k_begin) + item.first + b.first_token());
  }
  /// Whether codes come from the caller's memory, or go there. Those of `paper` never do.
  __device__ bool reads_codes() const {
    if constexpr (kCodes != Codes::made_or_read) return kCodes == Codes::read;
    return kBackward && kScheme == Scheme::vectorwise && job.saved.q8 != nullptr;
  }
  __device__ bool saves_codes() const {
    return !kBackward && kScheme == Scheme::vectorwise && job.saved.q8 != nullptr;
  }
  /// The thread's first token in that memory, heads included.
  __device__ int64_t saved_row(const Block& b, bool queries) const {
    const int64_t sequence = queries ? item.s.batch * job.seq.nq + item.s.q_begin
                                     : item.s.batch * job.seq.nk + item.s.k_begin;
    return item.head * (queries ? job.saved.queries : job.saved.keys) + sequence + item.first +
           b.first_token();
  }
  /// The place of a key's scale there.
  __device__ float* saved_k_scale(const Block& b) const {
    return job.saved.k_scale + (job.k_per_token ? saved_row(b, false) + b.own()
                                                : item.head * job.saved.key_blocks + item.block);
  }
  using Targets = typename Block::Targets;
  __device__ Targets with_saved(Targets to, int8_t* saved, int64_t row) const {
    if (saves_codes()) to.saved = saved + row * job.d, to.d = job.d;
    return to;
  }

  /// Waits for the mean of a key head, that of K with the signs of the rotation. It is zero if
  /// there is none.
  __device__ void load_mean(Block& b, const MeanJob& mean, int kv_head) const {
#pragma unroll
    for (int part = 0; part < Block::kParts; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) b.mean[part][e] = 0.0f;
    if (mean.mean == nullptr || item.s.nk == 0) return;
    const float* from = mean.flipped != nullptr ? mean.flipped : mean.mean;
    wait_for_mean(
        b.mean, from + (static_cast<int64_t>(item.s.index) * job.hk + kv_head) * D + b.channel(0));
  }

  /// The mean of V that the forward saved.
  __device__ void read_v_mean(Block& b, int kv_head) const {
    const float* from =
        job.saved.v_mean + (static_cast<int64_t>(item.s.index) * job.hk + kv_head) * job.d;
#pragma unroll
    for (int part = 0; part < Block::kParts; ++part) {
      float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
      if (static_cast<int>(b.channel(part)) < job.d) {
        const auto* at = reinterpret_cast<const float4*>(from + b.channel(part));
        low = at[0], high = at[1];
      }
      float(&to)[8] = b.mean[part];
      to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
      to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    }
  }

  /// Finds the scales of Q or dO: per `tokens` tokens in `paper`, else per token.
  template <Values kValues>
  __device__ void measure(Block& b, int tokens) const {
    if constexpr (kScheme == Scheme::paper)
      b.template measure_shared<kValues>(tokens);
    else
      b.template measure_tokens<kValues>();
  }

  /// Rounded to 22 significant bits, so that the offset of a KeyScale is exact; never 0.
  __device__ static float exact_scale(float scale) {
    if (numerics::is_finite(scale)) scale = __uint_as_float((__float_as_uint(scale) + 2u) & ~3u);
    return scale == 0.0f ? kZeroScale : scale;
  }

  /// Scale of the key that this lane owns. `common`: that of the keys which share one, poisoned or
  /// not.
  __device__ void write_k_scale(const Block& b, float common, bool poisoned) const {
    common = exact_scale(common);
    if (b.owns())
      job.k_scale[b.token0() + b.own()] = {poisoned ? __int_as_float(0x7fffffff) : common,
                                           -tile::kMagicFloat * common};
  }

  /// What sm90 knows of a block's K.
  __device__ void write_block_scale(const Block& b, float common, bool poisoned) const {
    BlockScales& of_block = job.block_scales[b.row0 / kBlock];
    of_block.k = exact_scale(common), of_block.k_poisoned = poisoned;
    if (kBackward && item.left > 0 && numerics::is_finite(common))
      atomicMax(job.k_top + static_cast<int64_t>(item.s.index) * job.hk + item.head,
                __float_as_uint(of_block.k));
  }
  /// The largest scale of V of the sequence, which sm90's queries wait for. Where documents are on
  /// the device there may be blocks behind the last one's end; nobody waits for those.
  __device__ void note_value_scale(float top) const {
    if (threadIdx.x != 0 || item.left <= 0) return;
    const int64_t at = static_cast<int64_t>(item.s.index) * job.hk + item.head;
    atomicMax(job.v_top + at, __float_as_uint(top));
    __threadfence();
    atomicAdd(job.v_done + at, 1u);
  }
  __device__ float wait_for_value_scale(int kv_head) const {
    const int64_t at = static_cast<int64_t>(item.s.index) * job.hk + kv_head;
    const uint32_t blocks = static_cast<uint32_t>((item.s.nk + kBlock - 1) / kBlock);
    while (*static_cast<volatile uint32_t*>(job.v_done + at) < blocks) __nanosleep(100);
    __threadfence();
    return __uint_as_float(*static_cast<volatile uint32_t*>(job.v_top + at));
  }

  __device__ void keys(Block& b) const {
    const Targets to{.rows = job.k8, .transpose = kBackward, .marks = true};
    if (reads_codes()) {
      typename Block::Words codes;
      b.get_codes(codes);
      const float common = b.own_is_real() ? *saved_k_scale(b) : 0.0f;
      // Poison of K needs no mark here: the LSE of queries that see it is NaN.
      if (kReader == Reader::sm90 && threadIdx.x == 0) write_block_scale(b, common, false);
      write_k_scale(b, common, b.take_marks(codes));
      b.put_all(to, codes);
    } else {
      b.flip(shared.signs);
      load_mean(b, job.k_mean, item.head);
      b.template make<true>();
      if (job.rotation > 0) b.rotate(job.rotation);
      float common;
      bool poisoned = false;  // one of the keys that share a scale
      if (kScheme == Scheme::vectorwise && job.k_per_token) {
        b.template measure_tokens<Values::made>();
        common = b.scale;
      } else {
        const typename Block::SharedScale shared_scale = b.template measure_shared<Values::made>(
            kScheme == Scheme::paper ? job.k_tokens : kBlock);
        common = shared_scale.scale, poisoned = shared_scale.poisoned;
      }
      if (kReader == Reader::sm90 && threadIdx.x == 0)
        write_block_scale(b, common, poisoned);
      else if (!kBackward && kScheme == Scheme::vectorwise && threadIdx.x == 0)
        job.tile_scale[b.row0 / kBlock].k = poisoned ? -exact_scale(common) : exact_scale(common);
      write_k_scale(b, common, b.scale != b.scale);
      if (saves_codes() && b.owns() && b.own_is_real() && (job.k_per_token || threadIdx.x == 0))
        *saved_k_scale(b) = common != common ? 0.0f : common;  // the mark says that it is poisoned
      b.template write_codes<Values::made>(with_saved(to, job.saved.k8, saved_row(b, false)));
    }
    if constexpr (kBackward) {
      __syncthreads();
      b.template write_transposed<kReader == Reader::sm80, true>(job.k8t);
    }
  }

  __device__ void values(Block& b) const {
    if (reads_codes()) {
      typename Block::Words codes;
      b.get_codes(codes);
      const float scale = b.own_is_real() ? job.saved.v_scale[saved_row(b, false) + b.own()] : 1.0f;
      if (b.owns()) job.v_scale[b.token0() + b.own()] = scale;
      if constexpr (kReader == Reader::sm90)
        note_value_scale(__uint_as_float(
            b.share_top(0, b.own_is_real() && numerics::is_finite(scale) ? scale : 0.0f, kBlock)
                .all));
      b.write_codes_16(job.v16, codes);
      return;
    }
    if (kBackward && !job.folds_v) {
      b.write_loaded(job.v16);
      return;
    }
    load_mean(b, job.v_mean, item.head);
    b.template make<true>();
    bool poisoned;
    float unit = 1.0f;
    if (job.folds_v) {
      poisoned = b.measure_values();
    } else {
      const typename Block::SharedScale of_tile =
          b.template measure_shared<Values::made>(job.tile_k);
      poisoned = of_tile.poisoned, unit = of_tile.scale;
    }
    if constexpr (kBackward) {
      if (b.owns()) job.v_scale[b.token0() + b.own()] = b.scale;
      if constexpr (kReader == Reader::sm90) note_value_scale(b.value_scale);
      b.write_codes_16(job.v16);
    } else if constexpr (kReader == Reader::sm90) {
      if (threadIdx.x == 0) {
        BlockScales& of_block = job.block_scales[b.row0 / kBlock];
        of_block.v = b.value_scale, of_block.v_poisoned = poisoned;
      }
      if (b.owns()) {
        const int64_t token = b.token0() + b.own();
        const float share = b.value_scale == 0.0f ? 0.0f : __fdividef(b.scale, b.value_scale);
        job.v_share[(token & ~int64_t{15}) + tile::place_of(static_cast<int>(token % 16))] =
            share != share ? kPoisonedShare : __half_as_ushort(__float2half_rn(share));
        if (saves_codes() && b.own_is_real())
          job.saved.v_scale[saved_row(b, false) + b.own()] = b.scale;
      }
      b.template write_codes<Values::made>(
          with_saved({.transpose = true}, job.saved.v8, saved_row(b, false)));
      __syncthreads();
      b.template write_transposed<false>(job.v8t);
    } else {
      const int mine = static_cast<int>(b.slot()) * kSteps;
      const int tile = static_cast<int>(b.row0 / kSlab) + mine / kSlab;  // of 64 keys
      if (mine % job.tile_k == 0 && b.member() == 0)
        job.tile_scale[job.tile_k == kSlab ? tile : tile / 2].v =
            poisoned ? __int_as_float(0x7fffffff) : unit;
      if (job.folded != nullptr && b.owns()) {
        const float folded = job.folds_v && !poisoned ? b.scale : 1.0f;
        const int token = mine + static_cast<int>(b.own());
        const int place = (token & ~15) + tile::place_of(token);
        FoldedScales& to = job.folded[b.row0 / kBlock];
        to.exponent[place] = log2f(folded) + FoldedScales::kBias;
        to.inverse[place] = arch::reciprocal_approx(folded);
      }
      const bool leading = item.first + mine < job.pv16_tiles * job.tile_k,
                 as_loaded = poisoned || (leading && job.v16_is_v);
      if (saves_codes() && b.owns() && b.own_is_real())
        job.saved.v_scale[saved_row(b, false) + b.own()] = b.scale;
      if (leading && !as_loaded) b.write_codes_16(job.v16);
      b.template write_codes<Values::made>(
          with_saved({.transpose = true}, job.saved.v8, saved_row(b, false)));
      __syncthreads();
      b.template write_transposed<false>(job.v8t);
      if (as_loaded) {
        // Loaded again: kept until here they would take registers that most blocks need.
        b.load(b.chunk, row(job.v, b, false), job.v, job.d);
        b.write_loaded(job.v16);
      }
    }
  }

  __device__ void queries(Block& b) const {
    const int64_t own = b.token0() + b.own();
    const Targets to{.rows = job.q8, .transpose = kBackward};
    float mean_logit;
    float lse = -INFINITY, dlse = 0.0f;
    const auto load_statistics = [&] {
      if (!b.own_is_real()) return;
      const int64_t token = item.s.q_begin + item.first + b.first_token() + b.own();
      lse = *tile::stat_of(job.lse, item.s, item.head, token);
      if (job.dlse.data != nullptr) dlse = *tile::stat_of(job.dlse, item.s, item.head, token);
    };
    constexpr bool kEarly = kCodes == Codes::read;  // there are registers to keep them in
    if constexpr (kBackward) clear_sums(b.row0);
    if constexpr (kEarly) load_statistics();
    if (reads_codes()) {
      const int64_t saved = saved_row(b, true);
      typename Block::Words codes;
      b.get_codes(codes);
      b.scale = b.own_is_real() ? job.saved.q_scale[saved + b.own()] : 0.0f;
      mean_logit = b.own_is_real() ? job.saved.mean_logit[saved + b.own()] : 0.0f;
      b.put_all(to, codes);
    } else {
      b.flip(shared.signs);
      load_mean(b, job.k_mean, item.kv_head);
      // The forward adds this number to LSE and the backward subtracts it again. Both need the same
      // bits, so the product is rounded by itself and not as part of a multiply-add.
      const float dot = dots(b, [&](int, int part, float(&y)[8]) {
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] = b.mean[part][e];
      });
      b.template make<false>();
      if (job.rotation > 0) b.rotate(job.rotation);
      measure<Values::made>(b, job.q_tokens);
      mean_logit = __fmul_rn(job.logit_scale, dot);
      const int64_t saved = saved_row(b, true);
      if (saves_codes() && b.owns() && b.own_is_real()) {
        job.saved.q_scale[saved + b.own()] = b.scale;
        job.saved.mean_logit[saved + b.own()] = mean_logit;
      }
      b.template write_codes<Values::made>(with_saved(to, job.saved.q8, saved));
    }
    const float logit_factor = b.scale * (job.logit_scale * numerics::kLog2e);
    if constexpr (!kBackward) {
      if (b.owns()) {
        // A query of zeros has logits 0 with any factor. A positive one keeps masked logits at
        // -inf, and next to a small one the start of the integer sums vanishes.
        job.logit_factor[own] = logit_factor == 0.0f ? kZeroScale : logit_factor;
        job.mean_logit[own] = mean_logit;
      }
    } else {
      __syncthreads();
      b.template write_transposed<false>(job.q8t);
      // Codes of dO take the place of these. In write_stats all threads meet before that.
      if (kReader != Reader::sm90) __syncthreads();
      if constexpr (!kEarly) load_statistics();
      // P = 0 for queries without keys and after the end.
      const float lse2 = lse == -INFINITY ? INFINITY : (lse - mean_logit) * numerics::kLog2e;
      douts(b, own, logit_factor == 0.0f ? kZeroScale : logit_factor, lse2, dlse);
    }
  }

  /// dO, after Q. A query needs numbers of both, and the lane that owns it has them.
  __device__ void douts(Block& b, int64_t own, float logit_factor, float lse2, float dlse) const {
    typename Block::Chunks out;
    if constexpr (kStagesGradients) {
      wait_for_stage();
      b.take(b.chunk, shared.stage[1]);
    } else {
      b.load(b.chunk, row(job.dout, b, true), job.dout, job.d);
      b.load(out, row(job.o, b, true), job.o, job.d);
    }
    if (job.do16 != nullptr) b.write_loaded(job.do16);
    measure<Values::loaded>(b, job.q_tokens);
    // Codes of V lack its mean: dP made from them lacks dO·mean(V), and so must D.
    if (reads_codes())
      read_v_mean(b, item.kv_head);
    else
      load_mean(b, job.v_mean, item.kv_head);
    float delta = dots(b, [&](int step, int part, float(&y)[8]) {
      if constexpr (kStagesGradients)
        Block::staged(shared.stage[2], step, part).unpack(y);
      else
        out[part][step].unpack(y);
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] -= b.mean[part][e];
    });
    start_rest();
    delta = lse2 == INFINITY ? 0.0f : delta - dlse;
    if constexpr (kReader == Reader::sm90) {
      write_stats(b, own, logit_factor, lse2, delta, dlse);
    } else if (b.owns()) {
      // A query with dO = 0 still has dS if dLSE is given, so its φ is tiny instead of 0.
      const float phi = b.scale == 0.0f ? 0x1p-90f : b.scale;
      const float slope = logit_factor / phi;
      job.row[own] = {logit_factor, lse2};
      job.exponent[own] = {logit_factor, lse2 - log2f(phi)};
      job.gradient[own] = {slope, -delta * slope};
    }
    b.template write_codes<Values::loaded>({.transpose = true});
    __syncthreads();
    b.template write_transposed<false>(job.do8t);
  }

  /// What sm90's backward knows of the 64 queries of a slab (QueryStats).
  __device__ void write_stats(Block& b, int64_t own, float logit_factor, float lse2, float delta,
                              float dlse) const {
    const float norm =
        sqrtf(dots(b, [&](int step, int part, float(&y)[8]) { b.chunk[part][step].unpack(y); }));
    // No dP, and no D, is larger than this times the norm of dO.
    const float most = numerics::kLevels * sqrtf(static_cast<float>(D)) *
                       fmaxf(wait_for_value_scale(item.kv_head), 0x1p-100f);
    const auto finite = [](float x) { return numerics::is_finite(x) ? x : 0.0f; };
    const bool sees = b.owns() && lse2 != INFINITY;
    const float phi = __uint_as_float(b.share_top(0, sees ? finite(b.scale) : 0.0f, kSlab).mine);
    if (job.dlse.data != nullptr) {
      // dLSE gives dS to queries with little or no dO. Their scale must not be tiny, and codes of
      // so little dO need not be fine.
      b.scale = arch::max_nan(b.scale, phi > 0.0f ? phi * 0x1p-6f : 1.0f);
      b.share_inverses();
    }
    const bool counts = sees && b.scale > 0.0f;
    const float ratio = counts ? logit_factor / b.scale : 0.0f;
    const float bound = ratio * (norm * most + fabsf(dlse));
    const float reference = phi > 0.0f ? phi : 1.0f,
                largest = __uint_as_float(b.share_top(1, finite(bound), kSlab).mine);
    QueryStats& stats = job.stats[b.row0 / kSlab + b.slot() * kSteps / kSlab];
    if (b.owns()) {
      const int token = static_cast<int>(own % kSlab);
      const int place = (token & ~15) + tile::place_of(token % 16);
      const bool poisoned = sees && b.scale != b.scale;
      const float slope = poisoned ? b.scale : largest > 0.0f ? ratio / largest : 0.0f;
      stats.factor[place] = logit_factor;
      stats.exponent[place] = poisoned ? b.scale
                              : counts ? 15.0f - lse2 + log2f(b.scale / reference)
                                       : -INFINITY;
      stats.slope[place] = slope, stats.offset[place] = counts || poisoned ? -delta * slope : 0.0f;
      // Queries with less dO than the largest have smaller sums. These are lifted, so that half
      // precision holds them all.
      const float lift = bound > 0.0f ? exp2f(floorf(fminf(log2f(largest / bound), 60.0f))) : 1.0f;
      job.dq_lift[own] = lift;
      job.row[own] = {logit_factor * lift / (reference * largest * kDqUnit), lse2};
    }
    if (threadIdx.x % (kRowThreads / 2) == 0)
      stats.dv_unit = reference * 0x1p-15f, stats.dq_unit = reference * largest * 0x1p-15f;
    __syncthreads();  // share_top's memory is free again
  }

  /// The dot product of the token that this lane owns with `other`. other(step, part, y) gives y
  /// the thread's eight channels of a part for its token `step`.
  template <typename Other>
  __device__ float dots(const Block& b, Other other) const {
    float sum[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sum[step] = 0.0f;
#pragma unroll
      for (int part = 0; part < Block::kParts; ++part) {
        float x[8], y[8];
        b.chunk[part][step].unpack(x);
        other(step, part, y);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[step] = fmaf(x[e], y[e], sum[step]);
      }
    }
    return scatter_reduce<Block::kLanes>(sum, b.member(), [](float x, float y) { return x + y; });
  }

  /// Zeroes the sums of dQ, to which the fused kernel adds.
  __device__ void clear_sums(int64_t row0) const {
    if (job.dq_sum == nullptr) return;
    const int64_t vectors = job.dq_halves ? D / 8 : D / 4;  // of a row
    auto* to = static_cast<uint4*>(job.dq_sum) + row0 * vectors + threadIdx.x;
    for (int i = 0; i < kBlock * static_cast<int>(vectors) / kRowThreads; ++i)
      to[i * kRowThreads] = make_uint4(0, 0, 0, 0);
  }

  /// Works on `item`, and asks for what `next` reads as soon as there is room for it.
  __device__ void run() {
    if (is_mean(item.kind)) {
      const bool of_k = item.kind == Kind::k_mean;
      const MeanJob mean = of_k ? job.k_mean : job.v_mean;
      const Strided x = of_k ? job.k : job.v;
      Mean{job, mean, x, item.head, shared.mean, shared.stage[0]}.run(
          item.block, item.from, item.left, [&](bool more, Source from, int left) {
            Kind kind = item.kind;
            if (!more) kind = next.kind, from = next.from, left = next.left;
            start(kind, from, left);
            if (!more) start_rest();
          });
      return;
    }
    Block b(shared.block, item.left,
            item.head * (item.kind == Kind::queries ? job.tq : job.tk) +
                static_cast<int64_t>(item.block) * kBlock);
    wait_for_stage();
    if (reads_codes())
      b.take_codes(shared.stage[0]);
    else
      b.take(b.chunk, shared.stage[0]);
    start(next.kind, next.from, next.left);
    if (item.kind != Kind::queries) start_rest();
    if (item.kind == Kind::keys)
      keys(b);
    else if (item.kind == Kind::values)
      values(b);
    else if (item.kind == Kind::queries)
      queries(b);
  }
};

template <typename T, int D, bool kBackward, Scheme kScheme, Reader kReader, Codes kCodes>
__global__ void __launch_bounds__(kRowThreads,
                                  Worker<T, D, kBackward, kScheme, kReader, kCodes>::kResident)
    operand_kernel(const __grid_constant__ OperandJob job) {
  using Work = Worker<T, D, kBackward, kScheme, kReader, kCodes>;
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Work::Shared*>(memory);
  arch::wait_for_earlier_kernels();
  arch::let_next_kernel_start();
  if (threadIdx.x == 0) {
    shared.item[0].kind = Kind::none;  // the first round asks for the first piece and does nothing
    shared.item[1] = item_at(job, atomicAdd(job.next, 1u));
  }
  if (threadIdx.x < 16)
    shared.signs.packed[threadIdx.x / 4][threadIdx.x % 4] =
        job.rotation > 0 ? tile::packed_signs(threadIdx.x % 4 * 32 + threadIdx.x / 4 * 8) : 0u;
  __syncthreads();
  int turn = 0;
  do {
    const int next = turn == 2 ? 0 : turn + 1, after = next == 2 ? 0 : next + 1;
    uint32_t ticket = 0;  // asked for now, so that the answer is there when it is needed
    if (threadIdx.x == 0) ticket = atomicAdd(job.next, 1u);
    Work{job, shared.item[turn], shared.item[next], shared}.run();
    if (threadIdx.x == 0) shared.item[after] = item_at(job, ticket);
    __syncthreads();
    turn = next;
  } while (shared.item[turn].kind != Kind::none);
}

template <typename T, int D, bool kBackward, Scheme kScheme, Reader kReader,
          Codes kCodes = kBackward ? Codes::made_or_read : Codes::made>
void run_operands(OperandJob job, cudaStream_t stream) {
  const Counts n(job);
  job.head_pieces = Divisor(n.means + n.codes), job.head_q_blocks = Divisor(job.q_blocks);
  job.q_blocks_each = Divisor(job.seq.q_blocks), job.k_blocks_each = Divisor(job.seq.k_blocks);
  const int64_t items = static_cast<int64_t>(job.hk) * (n.means + n.codes);
  int device = 0, multiprocessors = 0;
  SAGE_CUDA(cudaGetDevice(&device));
  SAGE_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  using Work = Worker<T, D, kBackward, kScheme, kReader, kCodes>;
  const int64_t places = static_cast<int64_t>(multiprocessors) * Work::kResident;
  launch(operand_kernel<T, D, kBackward, kScheme, kReader, kCodes>,
         dim3(static_cast<unsigned>(items < places ? items : places)), kRowThreads,
         static_cast<int>(sizeof(typename Work::Shared)), job, stream,
         kReader == Reader::sm90 ? Start::early : Start::behind);
}

}  // namespace sagebwd::cuda
