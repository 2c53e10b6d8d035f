// SPDX-License-Identifier: Apache-2.0
// Codes of one block of kBlock tokens of one head.
//
//   take → subtract mean → rotate → largest magnitude per token or per 64 or 128 tokens → codes
//   codes → row-major rows, in the workspace and in the caller's memory
//   codes → shared memory → transposed rows
//
// Tokens that hold NaN or Inf have codes 0 and scale NaN. They do not change the scale of their
// neighbours. The arithmetic is that of numerics/quantize.h, so the codes equal those of the other
// backends bit for bit.
//
// Four lanes share two tokens, and each has eight channels of every 32. That is what the rotation
// wants (tile/rotate.cuh). A number per token (a scale, a dot product) ends up in the lane that
// owns the token: member m of the four owns token m % 2.
#pragma once

#include "cuda/arch/target.cuh"
#include "cuda/sm80/quantize/stage.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/rotate.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tuned/transposed.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80 {

using tuned::scatter_reduce, tuned::word_at;

/// Which values codes are made of: those that were loaded, or what was made of them in FP32.
enum class Values { loaded, made };

/// tile::packed_signs of the chunks that each of the four lanes has, or zeros.
struct SignTable {
  alignas(16) uint32_t packed[4][4];  // [member][part]
};

template <typename T, int D>
struct TokenBlock {
  static constexpr int kLanes = 4, kSteps = 2, kParts = D / 32;
  static constexpr int kWarps = kRowThreads / 32;
  static_assert(kRowThreads / kLanes * kSteps == kBlock);

  struct Shared {
    uint32_t codes[kBlock * D / 4];
    alignas(16) uint32_t top[2][kWarps];  // bits of largest magnitudes
  };

  Shared& shared;
  // Asked for with every block: what follows from it would else be kept, and there are no
  // registers.
  uint32_t thread = arch::thread_index();
  int64_t row0;  // first token of the block in the workspace, heads included
  int left;      // tokens from the thread's first to the end of the sequence
  using Chunks = Chunk<T>[kParts][kSteps];
  Chunks chunk;
  float made[kSteps][kParts][8];
  float mean[kParts][8];
  float inverse[kSteps];  // factor to codes of each token; 0: its codes are 0
  float scale;            // of the token that this lane owns; 0 after the end

  float unit = 1.0f;  // of what was made

  /// `tokens`: from the block's first to the end of its sequence. `row`: the first in the
  /// workspace.
  __device__ TokenBlock(Shared& s, int tokens, int64_t row)
      : shared(s), row0(row), left(tokens - first_token()) {}
  /// The thread's first token in the block.
  __device__ int first_token() const { return static_cast<int>(slot()) * kSteps; }

  /// The thread's first token in the workspace.
  __device__ int64_t token0() const { return row0 + slot() * kSteps; }

  /// Which of the lanes that share tokens this is, and which tokens and channels they are.
  __device__ uint32_t member() const { return thread % kLanes; }
  __device__ uint32_t slot() const { return thread / kLanes; }
  __device__ uint32_t channel(int part) const {
    return static_cast<uint32_t>(part) * 32 + member() * 8;
  }
  __device__ uint32_t own() const { return member() % kSteps; }
  __device__ bool owns() const { return member() < kSteps; }
  __device__ bool own_is_real() const { return static_cast<int>(own()) < left; }

  /// Loads the thread's tokens. `at`: the row of the first.
  __device__ void load(Chunks& to, const T* at, const Strided& x, int d) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      load_chunks<Reading::once>(to[part], at + channel(part), x.token,
                                 static_cast<int>(channel(part)) < d ? left : 0, x.vector);
  }

  /// Asks for the thread's tokens, or for their codes. Arguments are those of MeanBlock::start.
  __device__ static void start(Stage<D>& stage, const Source& from, int tokens, int d) {
    const uint32_t thread = arch::thread_index(), channel = thread % kLanes * 8;
    const int first = static_cast<int>(thread / kLanes) * kSteps;
    stage.template start<Reading::once, kSteps>(from.at + first * from.stride + channel * sizeof(T),
                                                from.stride, tokens - first,
                                                d - static_cast<int>(channel), from.vector);
  }
  __device__ static void start_codes(Stage<D>& stage, const Source& from, int tokens, int d) {
    const uint32_t thread = arch::thread_index(), channel = thread % kLanes * 8;
    const int first = static_cast<int>(thread / kLanes) * kSteps;
    stage.template start_codes<kSteps>(from.at + first * from.stride + channel, from.stride,
                                       tokens - first, d - static_cast<int>(channel));
  }

  /// Takes what has arrived in the stage.
  __device__ static void take(Chunks& to, const Stage<D>& stage) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) to[part][step] = staged(stage, step, part);
  }
  __device__ static Chunk<T> staged(const Stage<D>& stage, int step, int part) {
    return {stage.chunk[part * kSteps + step][threadIdx.x]};
  }

  /// Gives what was loaded the signs of the rotation.
  __device__ void flip(const SignTable& signs) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t flips = signs.packed[member()][part] << w;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint4& bits = chunk[part][step].bits;
          uint32_t& word = w == 0 ? bits.x : w == 1 ? bits.y : w == 2 ? bits.z : bits.w;
          word ^= flips & 0x80008000u;
        }
      }
  }

  /// Makes values of what was loaded: without the mean, or as they are. Those after the end are not
  /// used, nor are those of channels after the last: the mean there is zero.
  template <bool kSmooth>
  __device__ void make() {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        chunk[part][step].unpack(made[step][part]);
        if constexpr (kSmooth)
#pragma unroll
          for (int e = 0; e < 8; ++e) made[step][part][e] -= mean[part][e];
      }
  }

  /// Rotates them, behind flip: numerics::rotate with blocks of `size` channels. kUnitStays: at
  /// d 64 the factor 1/8 stays off, and goes into what is made of the values later.
  template <bool kUnitStays = true>
  __device__ void rotate(int size) {
    if (size == D) {  // most calls; the constant saves instructions
      constexpr bool kExactUnit = D == 64 && kUnitStays;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        tile::hadamard<!kExactUnit>(made[step], member(), D);
      if constexpr (kExactUnit) unit = numerics::rotation_unit(D);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) tile::hadamard(made[step], member(), size);
    }
  }

  /// What was loaded stays in registers as it is. The compiler would make codes of it early, and
  /// keep them beside it.
  __device__ void keep_chunks() {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint4& bits = chunk[part][step].bits;
        arch::keep(bits.x), arch::keep(bits.y), arch::keep(bits.z), arch::keep(bits.w);
      }
  }

  template <Values kValues>
  __device__ void values(int step, int part, float (&x)[8]) const {
    if constexpr (kValues == Values::loaded) {
      chunk[part][step].unpack(x);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = made[step][part][e];
    }
  }

  /// Largest magnitude of this thread's channels of a token; 0 after the end.
  template <Values kValues>
  __device__ float top_of(int step) const {
    float top = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if constexpr (kValues == Values::loaded) {
        top = arch::max_nan(top, chunk[part][step].top());
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) top = arch::max_nan(top, fabsf(made[step][part][e]));
      }
    }
    return step < left ? top * unit_of<kValues>() : 0.0f;
  }

  /// Largest magnitude of the token that this lane owns.
  template <Values kValues>
  __device__ float own_top() const {
    float top[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) top[step] = top_of<kValues>(step);
    return scatter_reduce<kLanes>(top, member(),
                                  [](float a, float b) { return arch::max_nan(a, b); });
  }

  template <Values kValues>
  __device__ float unit_of() const {
    return kValues == Values::made ? unit : 1.0f;
  }

  /// Every lane learns the factors of the tokens from the lanes that own them.
  template <Values kValues = Values::loaded>
  __device__ void share_inverses() {
    const float mine = own_is_real() ? numerics::inverse_of(scale) * unit_of<kValues>() : 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      inverse[step] = __shfl_sync(0xffffffffu, mine, step, kLanes);
  }

  /// One scale per token.
  template <Values kValues>
  __device__ void measure_tokens() {
    scale = numerics::scale_of(own_top<kValues>());
    share_inverses<kValues>();
  }

  /// One scale per key, and one per token of V, that depend on nothing but the token.
  __device__ void measure_keys() {
    scale = numerics::key_scale_of(own_top<Values::made>());
    share_inverses<Values::made>();
  }
  __device__ void measure_lone_values() {
    scale = numerics::lone_value_scale(own_top<Values::made>());
    share_inverses<Values::made>();
  }

  /// A scale that several tokens share. Those that hold NaN or Inf are left out, and `poisoned`
  /// says that there are some.
  struct SharedScale {
    float scale;
    bool poisoned;
  };
  /// One scale per `tokens` tokens, 64 or 128.
  template <Values kValues>
  __device__ SharedScale measure_shared(int tokens) {
    float top = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) top = arch::max_nan(top, top_of<kValues>(step));
    uint32_t bad = 0;  // a bit per token
    const Tops tops = share_top(0, top, tokens);
    float amax = __uint_as_float(tops.mine);
    const bool poisoned = !numerics::is_finite(amax);
    if (!numerics::is_finite(__uint_as_float(tops.all)))
      amax = measure_poisoned<kValues>(tokens, bad);
    const float common = numerics::scale_of(amax),
                factor = numerics::inverse_of(common) * unit_of<kValues>();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      inverse[step] = step < left && ((bad >> step) & 1) == 0 ? factor : 0.0f;
    scale = !own_is_real() ? 0.0f : ((bad >> own()) & 1) != 0 ? __int_as_float(0x7fffffff) : common;
    return {common, poisoned};
  }

  /// The largest number of all threads whose tokens share a scale, and of the whole block, as bits.
  /// Bits of magnitudes have the order of the numbers, with NaN on top.
  struct Tops {
    uint32_t mine, all;
  };
  __device__ Tops share_top(int buffer, float top, int tokens) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(top));
    if (thread % 32 == 0) shared.top[buffer][thread / 32] = most;
    __syncthreads();
    static_assert(kWarps == 8 && kBlock == 128, "half of the warps hold 64 tokens");
    const auto* tops = reinterpret_cast<const uint4*>(shared.top[buffer]);
    const uint4 a = tops[0], b = tops[1];
    const uint32_t low = max(max(a.x, a.y), max(a.z, a.w)),
                   high = max(max(b.x, b.y), max(b.z, b.w)), all = max(low, high);
    return {tokens == kBlock ? all : thread < kRowThreads / 2 ? low : high, all};
  }

  /// The largest magnitude without tokens that hold NaN or Inf; `bad` says which those are.
  template <Values kValues>
  __device__ float measure_poisoned(int tokens, uint32_t& bad) {
    float top = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float here = top_of<kValues>(step);
      if (slot_any<kLanes>(!numerics::is_finite(here)))
        bad |= 1u << step;
      else
        top = fmaxf(top, here);
    }
    return __uint_as_float(share_top(1, top, tokens).mine);
  }

  /// Where codes go.
  struct Targets {
    int8_t* rows = nullptr;   // [tokens, D] in the workspace; null: not there
    bool transpose = false;   // to shared memory
    int8_t* saved = nullptr;  // [tokens, d] in the caller's memory, from the thread's first token
                              // on; null: not there
    int d = 0;
  };

  /// round(x·inverse) with two roundings, as numerics::code_nearest; 0 where `inverse` is 0.
  __device__ static uint32_t code_word(float a, float b, float c, float d, float inverse) {
    a = __fmul_rn(a, inverse), b = __fmul_rn(b, inverse);
    c = __fmul_rn(c, inverse), d = __fmul_rn(d, inverse);
    if constexpr (arch::kTarget >= 860)
      return arch::to_bytes<arch::Bytes::s8>(a, b, c, d);  // NaN, which Inf·0 is, becomes 0
    const auto bits = [](float y) { return __float_as_uint(__fadd_rn(y, tile::kMagicFloat)); };
    return inverse == 0.0f ? 0u : tile::pack(bits(a), bits(b), bits(c), bits(d));
  }

  template <Values kValues>
  __device__ void write_codes(const Targets& to) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float x[8];
        values<kValues>(step, part, x);
        const uint2 words = make_uint2(code_word(x[0], x[1], x[2], x[3], inverse[step]),
                                       code_word(x[4], x[5], x[6], x[7], inverse[step]));
        put(to, step, part, words);
        if (to.saved != nullptr && step < left && static_cast<int>(channel(part)) < to.d)
          *reinterpret_cast<uint2*>(to.saved + static_cast<int64_t>(step) * to.d + channel(part)) =
              words;
      }
    }
  }

  /// Eight codes to the workspace and to shared memory.
  __device__ void put(const Targets& to, int step, int part, uint2 words) const {
    if (to.rows != nullptr)
      *reinterpret_cast<uint2*>(to.rows + (token0() + step) * D + channel(part)) = words;
    if (to.transpose)
      *reinterpret_cast<uint2*>(shared.codes +
                                word_at<D>(slot() * kSteps + step, channel(part) / 4)) = words;
  }

  /// Saved codes of the thread's tokens; zero after the end.
  using Words = uint2[kParts][kSteps];

  /// Takes them from the stage. Chunks keep them, because a piece of work has either.
  __device__ void take_codes(Stage<D>& stage) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint2 words = stage.codes(part * kSteps + step);
        chunk[part][step].bits = make_uint4(words.x, words.y, 0, 0);
      }
  }
  __device__ void get_codes(Words& to) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        to[part][step] = make_uint2(chunk[part][step].bits.x, chunk[part][step].bits.y);
  }

  /// The codes that this thread has put into shared memory.
  __device__ void take_back(Words& to) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        to[part][step] = *reinterpret_cast<const uint2*>(
            shared.codes + word_at<D>(slot() * kSteps + step, channel(part) / 4));
  }

  __device__ void put_all(const Targets& to, const Words& codes) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) put(to, step, part, codes[part][step]);
  }

  /// Writes transposed rows of the codes in shared memory, after a barrier.
  template <bool kTurned>
  __device__ void write_transposed(int8_t* to) const {
    constexpr uint32_t kThreads = D / 4 * (kBlock / 16);
    static_assert(kThreads <= kRowThreads);
    if (thread >= kThreads) return;
    tuned::write_transposed<D, kTurned>(to, row0, shared.codes, thread);
  }

  /// Writes codes of what was made as 16-bit numbers, which hold them exactly.
  __device__ void write_codes_16(void* to) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        alignas(16) T code[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float scaled = __fmul_rn(made[step][part][e], inverse[step]);
          // Adding zero makes +0 of -0.
          code[e] = static_cast<T>(inverse[step] == 0.0f ? 0.0f : rintf(scaled) + 0.0f);
        }
        *chunk_at(to, step, part) = *reinterpret_cast<const uint4*>(code);
      }
  }

  /// The same of saved codes.
  __device__ void write_codes_16(void* to, const Words& codes) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint2 low = tile::widened<T>(codes[part][step].x),
                    high = tile::widened<T>(codes[part][step].y);
        *chunk_at(to, step, part) = make_uint4(low.x, low.y, high.x, high.y);
      }
  }

  /// Writes what was loaded, as it is.
  __device__ void write_loaded(void* to) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int part = 0; part < kParts; ++part) *chunk_at(to, step, part) = chunk[part][step].bits;
  }

  __device__ uint4* chunk_at(void* to, int step, int part) const {
    return reinterpret_cast<uint4*>(static_cast<T*>(to) + (token0() + step) * D + channel(part));
  }
};

}  // namespace sagebwd::cuda::sm80
