// SPDX-License-Identifier: Apache-2.0
// The operands of queries, from saved codes of Q, from dO and from O:
//
//   dO → shared memory → 16-bit copy, scales, codes → shared memory → dO8ᵀ
//   O  → shared memory → dO·O
//   Q8 → registers → shared memory, in place of O → Q8ᵀ
//
// Nobody waits for another thread block, so a thread block takes one piece of work
// and ends. It asks for all that it reads at once. Several share a multiprocessor: while some
// wait, others compute.
//
// Four lanes share 256 / D tokens, and each has eight channels of every 32.
#pragma once

#include <type_traits>

#include "cuda/arch/convert.cuh"
#include "cuda/arch/kernel_order.cuh"
#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/shared_memory.cuh"
#include "cuda/arch/target.cuh"
#include "cuda/sm90/bwd/operands.h"
#include "cuda/sm90/bwd/query_numbers.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tuned/exact_scale.cuh"
#include "cuda/tuned/rows.cuh"
#include "cuda/tuned/transposed.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm90 {

using tuned::Chunk, tuned::Divisor, tuned::kZeroScale, tuned::word_at;

struct QueryJob : BackwardJob {
  explicit QueryJob(const BackwardJob& job)
      : BackwardJob(job), heads(job.h), heads_of_key(job.group), q_blocks_each(job.seq.q_blocks) {}
  Divisor heads, heads_of_key, q_blocks_each;  // by h, by group, by blocks of a sequence
};

/// regular: nothing is packed, and rows of dO and O are aligned for copies of 16 bytes.
enum class Form { regular, any };

template <typename T, int D, Form kForm>
struct QueryPiece {
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kLanes = 4, kSteps = 256 / D, kParts = D / 32;
  static constexpr int kTokens = kThreads / kLanes * kSteps;
  static constexpr int kSlabThreads = kThreads * kSlab / kTokens;
  static constexpr int kChunksOfRow = D / 8, kChunks = kTokens * kChunksOfRow / kThreads;
  static_assert(kTokens == backward_queries(D), "a thread block finds the largest of a tile");

  struct Shared {
    uint4 dout[kTokens * kChunksOfRow];
    union {
      uint4 out[kTokens * kChunksOfRow];
      uint32_t codes[2][kTokens * D / 4];  // of Q and of dO
    };
    float factor[kTokens];
    QueryNumbers::Common common[kTokens];
    alignas(16) uint32_t top[2][kWarps];  // bits of largest numbers
  };
  static constexpr int kResident = 6;
  static_assert(arch::shared_memory_for(sizeof(Shared), kResident) <= arch::shared_memory_of(900));

  const QueryJob& job;
  Shared& shared;
  uint32_t thread;
  int head, kv_head;
  tile::Sequence s;
  int first;     // token of the sequence
  int left;      // tokens from there to the end of the sequence
  int64_t row0;  // the first token in the workspace, heads included

  /// Thread blocks go through the heads first: in the caller's memory heads may lie side by side.
  __device__ QueryPiece(const QueryJob& j, Shared& memory)
      : job(j), shared(memory), thread(threadIdx.x) {
    const int block = static_cast<int>(blockIdx.x), piece = job.heads.divide(block);
    head = block - piece * job.h, kv_head = job.heads_of_key.divide(head);
    const int q_block = piece / (kBlock / kTokens);
    if constexpr (kForm == Form::regular) {
      Sequences seq = job.seq;
      seq.documents = nullptr;
      s = tile::sequence_at<kBlock>(seq, job.q_blocks_each.divide(q_block));
    } else {
      s = tile::sequence_of_block<kBlock>(job.seq, q_block, true);
    }
    const int64_t token = static_cast<int64_t>(piece) * kTokens;
    first = static_cast<int>(token - s.q_pad), left = s.nq - first;
    row0 = head * job.tq + token;
  }

  // Which of the lanes that share tokens this is, and which tokens they are: with this order their
  // codes go to different banks.
  __device__ uint32_t member() const { return thread % kLanes; }
  __device__ uint32_t slot() const { return thread / kLanes; }
  __device__ int token(uint32_t step) const {
    return static_cast<int>(slot() / 4 * (4 * kSteps) + slot() % 4 * 2 + step % 2 + step / 2 * 8);
  }
  /// A lane has the numbers of one token, the lower lanes those that are written.
  __device__ int own() const { return token(member() % kSteps); }
  __device__ bool owns() const { return member() < kSteps; }

  // Where eight channels of dO or O lie. The exclusive or spreads over the banks what is accessed
  // together.
  __device__ static uint32_t chunk_at(uint32_t token, uint32_t chunk) {
    return token * kChunksOfRow + (chunk ^ (token >> 1 & 1) << 2);
  }

  /// The thread's part of what is copied: a piece of each kStride-th row from `row` on.
  template <int kPiecesOfRow>
  struct Part {
    static constexpr int kStride = kThreads / kPiecesOfRow, kRows = kTokens / kStride;
    uint32_t row, piece;
    __device__ explicit Part(uint32_t thread)
        : row(thread / kPiecesOfRow), piece(thread % kPiecesOfRow) {}
    __device__ uint32_t row_of(int i) const { return row + static_cast<uint32_t>(i * kStride); }
  };
  using RowPart = Part<kChunksOfRow>;
  using CodePart = Part<D / 16>;

  __device__ void start_rows(uint4* to, const Strided& x) const {
    const RowPart part(thread);
    const T* from =
        tile::row_of<const T>(x, s, head, s.q_begin + first + part.row) + part.piece * 8;
    if (kForm == Form::any && !x.vector) return load_slowly(to, from, x);
#pragma unroll
    for (int i = 0; i < RowPart::kRows; ++i, from += RowPart::kStride * x.token)
      arch::cp_async_16_once_or_zero(
          arch::shared_address(to + chunk_at(part.row_of(i), part.piece)), from,
          static_cast<int>(part.row_of(i)) < left);
  }
  /// The same for rows that are not aligned. Later waits for copies find them there.
  __device__ void load_slowly(uint4* to, const T* from, const Strided& x) const {
    const RowPart part(thread);
#pragma unroll 1
    for (int i = 0; i < RowPart::kRows; ++i, from += RowPart::kStride * x.token) {
      alignas(16) T row[8] = {};
      if (static_cast<int>(part.row_of(i)) < left)
#pragma unroll
        for (int e = 0; e < 8; ++e) row[e] = from[e];
      to[chunk_at(part.row_of(i), part.piece)] = *reinterpret_cast<const uint4*>(row);
    }
  }
  /// The first of the piece's queries in the saved codes.
  __device__ int64_t saved_row() const {
    return head * job.saved.queries + s.batch * job.seq.nq + s.q_begin + first;
  }
  /// The thread's part of the codes of Q; zero after the end.
  using Q8 = uint4[CodePart::kRows];
  __device__ void load_codes(Q8& q8) const {
    const CodePart part(thread);
    const int8_t* from = job.saved.q8 + (saved_row() + part.row) * D + part.piece * 16;
#pragma unroll
    for (int i = 0; i < CodePart::kRows; ++i) {
      q8[i] = make_uint4(0, 0, 0, 0);
      if (static_cast<int>(part.row_of(i)) < left)
        q8[i] = __ldcg(reinterpret_cast<const uint4*>(from + i * CodePart::kStride * D));
    }
  }
  /// To the workspace, where the saved codes lack the padding.
  __device__ void write_codes(const Q8& q8) const {
    auto* to = reinterpret_cast<uint4*>(job.q8 + row0 * D) + thread;
#pragma unroll
    for (int i = 0; i < CodePart::kRows; ++i) to[i * kThreads] = q8[i];
  }
  __device__ void put_codes(const Q8& q8) const {
    const CodePart part(thread);
#pragma unroll
    for (int i = 0; i < CodePart::kRows; ++i)
      *reinterpret_cast<uint4*>(shared.codes[0] + word_at<D>(part.row_of(i), part.piece * 4)) =
          q8[i];
  }

  /// The copy of dO, each thread what it has itself asked for.
  __device__ void write_dout() const {
    const RowPart part(thread);
    auto* to = static_cast<uint4*>(job.do16) + row0 * kChunksOfRow + thread;
#pragma unroll
    for (int i = 0; i < RowPart::kRows; ++i)
      to[i * kThreads] = shared.dout[chunk_at(part.row_of(i), part.piece)];
  }

  /// Zeroes the sums of dQ, to which the main kernel adds.
  __device__ void clear_sums() const {
    const int vectors = job.dq_halves ? D / 8 : D / 4;  // of a row
    auto* to = static_cast<uint4*>(job.dq_sum) + row0 * vectors + thread;
#pragma unroll 8
    for (int i = 0; i < kTokens * vectors / kThreads; ++i)
      to[i * kThreads] = make_uint4(0, 0, 0, 0);
  }

  /// Reduces a number of each token over the lanes that share it: a lane gets that of its own. In
  /// the order of scatter_reduce for two tokens, so that sums have the same bits.
  template <typename Op>
  __device__ float own_of(float (&v)[kSteps], Op op) const {
    int count = kSteps;
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) {
      if (count == 1) {
        v[0] = op(v[0], __shfl_xor_sync(0xffffffffu, v[0], bit));
        continue;
      }
      const bool odd = (member() & static_cast<uint32_t>(bit)) != 0;
      count /= 2;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float low = v[2 * i], high = v[2 * i + 1];
        v[i] = op(odd ? high : low, __shfl_xor_sync(0xffffffffu, odd ? low : high, bit));
      }
    }
    return v[0];
  }

  /// What follows from dO and O alone, of the lane's own query.
  struct Products {
    float top, delta, square;
  };
  __device__ Products products() const {
    using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
    Pair most[kSteps];
    float delta[kSteps], square[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) delta[step] = square[step] = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t chunk = static_cast<uint32_t>(part) * 4 + member();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t at = chunk_at(static_cast<uint32_t>(token(step)), chunk);
        const Chunk<T> dout{shared.dout[at]}, out{shared.out[at]};
        const uint32_t word[4] = {dout.bits.x, dout.bits.y, dout.bits.z, dout.bits.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const Pair here = __habs2(reinterpret_cast<const Pair&>(word[w]));
          most[step] = part == 0 && w == 0 ? here : __hmax2_nan(most[step], here);
        }
        float x[8], y[8];
        dout.unpack(x), out.unpack(y);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          delta[step] = fmaf(x[e], y[e], delta[step]);
          square[step] = fmaf(x[e], x[e], square[step]);
        }
      }
    }
    const auto sum = [](float a, float b) { return a + b; };
    float top[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      top[step] = arch::max_nan(static_cast<float>(most[step].x), static_cast<float>(most[step].y));
    return {own_of(top, [](float a, float b) { return arch::max_nan(a, b); }), own_of(delta, sum),
            own_of(square, sum)};
  }

  // The largest number of the tile: warps write theirs, and read all behind a barrier.
  __device__ void put_top(int buffer, float x) const {
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(x));
    if (thread % 32 == 0) shared.top[buffer][thread / 32] = most;
  }
  __device__ float top(int buffer) const {
    static_assert(kWarps == 4);
    const uint4 of = *reinterpret_cast<const uint4*>(shared.top[buffer]);
    return __uint_as_float(max(max(of.x, of.y), max(of.z, of.w)));
  }

  __device__ void make_codes(float scale) const {
    const float mine = own() < left ? numerics::inverse_of(scale) : 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float inverse = __shfl_sync(0xffffffffu, mine, step, kLanes);
      const uint32_t row = static_cast<uint32_t>(token(step));
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint32_t chunk = static_cast<uint32_t>(part) * 4 + member();
        float x[8];
        Chunk<T>{shared.dout[chunk_at(row, chunk)]}.unpack(x);
        uint32_t word[2];
#pragma unroll
        for (int w = 0; w < 2; ++w)  // NaN, which Inf·0 is, becomes 0
          word[w] = arch::to_bytes<arch::Bytes::s8>(
              __fmul_rn(x[4 * w], inverse), __fmul_rn(x[4 * w + 1], inverse),
              __fmul_rn(x[4 * w + 2], inverse), __fmul_rn(x[4 * w + 3], inverse));
        *reinterpret_cast<uint2*>(shared.codes[1] + word_at<D>(row, chunk * 2)) =
            make_uint2(word[0], word[1]);
      }
    }
  }

  __device__ void run() {
    const int token = own();
    float q_scale = 0.0f, lse = -INFINITY, dlse = 0.0f;
    const bool has_dlse = job.dlse.data != nullptr;
    if (token < left) {
      const int64_t saved = saved_row() + token, at = s.q_begin + first + token;
      q_scale = job.saved.q_scale[saved];
      lse = *tile::stat_of(job.lse, s, head, at);
      if (has_dlse) dlse = *tile::stat_of(job.dlse, s, head, at);
    }
    Q8 q8;
    load_codes(q8);
    start_rows(shared.dout, job.dout);
    start_rows(shared.out, job.o);
    arch::cp_async_commit();
    clear_sums();
    // The kernel before this one finds the largest scales. It has itself waited for all others, so
    // only these must not be read before.
    arch::wait_for_earlier_kernels();
    uint32_t v_top = __ldcg(job.v_top + static_cast<int64_t>(s.index) * job.hk + kv_head);
    arch::keep(v_top);  // asked for here, not when it is needed
    arch::cp_async_wait<0>();
    if (job.do16 != nullptr) write_dout();
    if (job.q8 != nullptr) write_codes(q8);
    __syncthreads();

    const Products of_dout = products();
    const float factor = q_scale * (job.logit_scale * numerics::kLog2e);
    // P = 0 for queries without keys and after the end.
    const float lse2 = lse == -INFINITY ? INFINITY : lse * numerics::kLog2e;
    QueryNumbers query{.logit_factor = factor == 0.0f ? kZeroScale : factor,
                       .lse2 = lse2,
                       .delta = lse2 == INFINITY ? 0.0f : of_dout.delta - dlse,
                       .dlse = dlse,
                       .norm = sqrtf(of_dout.square),
                       .scale = numerics::scale_of(of_dout.top)};
    QueryNumbers::Largest of;
    put_top(0, query.phi());
    if (has_dlse) {
      __syncthreads();
      query.raise_scale(top(0));
    }
    const float ratio = query.ratio(),
                bound = query.bound(ratio, QueryNumbers::most_per_norm<D>(__uint_as_float(v_top)));
    put_top(1, QueryNumbers::finite(bound));
    __syncthreads();  // also, nobody reads O any more
    of.phi = top(0), of.bound = top(1);
    put_codes(q8);
    make_codes(query.scale);
    const int64_t row = row0 + token;
    QueryStats& stats = job.stats[row / kSlab];
    if (owns()) {
      const int slab_token = token % kSlab,
                place = (slab_token & ~15) + tile::place_of(slab_token % 16);
      shared.factor[token] = query.logit_factor;
      shared.common[token] =
          query.write(stats, place, job.dq_lift[row], job.row[row], ratio, bound, of);
    }
    if (thread % kSlabThreads == 0) QueryNumbers::write_units(stats, of);
    __syncthreads();
    tuned::write_transposed<D, false>(job.q8t, row0, shared.codes[0], thread);
    tuned::write_transposed<D, false>(job.do8t, row0, shared.codes[1], thread);
    write_exponents();
    write_offsets();
  }

  /// The exponents of all octaves of keys: those of the queries, and the logits of the centres.
  __device__ void write_exponents() const {
    constexpr int kPieces = D / 16, kRows = CodePart::kRows;  // of 16 channels, of a row
    static_assert(kRows == 4 && kPieces >= kRows);
    const CodePart part(thread);
    // A lane ends up with one of the rows that it shares.
    const uint32_t row = part.row_of(static_cast<int>(part.piece % kRows)),
                   place = (row & ~15u) +
                           static_cast<uint32_t>(tile::place_of(static_cast<int>(row % 16)));
    const float factor = shared.factor[row], own = shared.common[row].exponent;
    int q8[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      *reinterpret_cast<uint4*>(q8[i]) = *reinterpret_cast<const uint4*>(
          shared.codes[0] + word_at<D>(part.row_of(i), part.piece * 4));
    const int64_t first = kv_head * job.saved.key_blocks + s.k_pad / kBlock;
    OctaveStats* to = job.octave_stats + (row0 + row) / kSlab;
#pragma unroll 1
    for (int octave = 0; octave < numerics::octaves_of(s.nk);
         ++octave, to += job.h * job.tq / kSlab) {
      const int64_t centre = first + numerics::first_block_of(octave);
      const int4 m = __ldcg(reinterpret_cast<const int4*>(job.centre8 + centre * D) + part.piece);
      float dots[kRows];  // integers, and exact
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        dots[i] = static_cast<float>(__dp4a(
            q8[i][0], m.x, __dp4a(q8[i][1], m.y, __dp4a(q8[i][2], m.z, __dp4a(q8[i][3], m.w, 0)))));
      const float dot =
          tuned::scatter_reduce<kPieces>(dots, part.piece, [](float a, float b) { return a + b; });
      if (part.piece < kRows)
        to->exponent[place % kSlab] = own + dot * __ldcg(job.centre_scale + centre) * factor;
    }
  }

  /// The offsets of all octaves of keys, with dO times the centres of V: products of the 16-bit dO
  /// with eight octaves at once. A warp has 16 queries.
  __device__ void write_offsets() const {
    const uint32_t lane = thread % 32, g = lane / 4, t = lane % 4;
    const int octaves = numerics::octaves_of(s.nk);
    const int64_t first_block = kv_head * job.saved.key_blocks + s.k_pad / kBlock;
#pragma unroll 1
    for (uint32_t token0 = thread / 32 * 16; token0 < kTokens; token0 += kWarps * 16)
#pragma unroll 1
      for (int octave0 = 0; octave0 < octaves; octave0 += 8) {
        float sums[4] = {};
        const int mine = min(octave0 + static_cast<int>(g), octaves - 1);
        const int8_t* codes =
            job.v_centre8 + (first_block + numerics::first_block_of(mine)) * D + 2 * t;
#pragma unroll
        for (uint32_t channel = 0; channel < D; channel += 16) {
          uint32_t a[4], b[2];
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i)
            a[i] = reinterpret_cast<const uint32_t*>(
                shared.dout + chunk_at(token0 + g + i % 2 * 8, channel / 8 + i / 2))[t];
#pragma unroll
          for (uint32_t i = 0; i < 2; ++i) {
            const auto pair = __ldcg(reinterpret_cast<const short*>(codes + channel + 8 * i));
            b[i] = tile::pack_16<T>(static_cast<float>(static_cast<int8_t>(pair & 0xff)),
                                    static_cast<float>(pair >> 8));
          }
          arch::mma_16<T>(sums, a, b[0], b[1]);
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const int octave = octave0 + static_cast<int>(2 * t + i % 2);
          const uint32_t token = token0 + g + i / 2 * 8;
          if (octave >= octaves) continue;
          const float scale =
              __ldcg(job.v_centre_scale + first_block + numerics::first_block_of(octave));
          const QueryNumbers::Common& common = shared.common[token];
          const uint32_t place =
              (token & ~15u) + static_cast<uint32_t>(tile::place_of(static_cast<int>(token % 16)));
          job.octave_stats[octave * (job.h * job.tq / kSlab) + (row0 + token) / kSlab]
              .offset[place % kSlab] = common.slope == 0.0f
                                           ? common.offset
                                           : fmaf(common.slope, sums[i] * scale, common.offset);
        }
      }
  }
};

template <typename T, int D, Form kForm>
__global__ void __launch_bounds__(QueryPiece<T, D, kForm>::kThreads,
                                  QueryPiece<T, D, kForm>::kResident)
    query_piece_kernel(const __grid_constant__ QueryJob job) {
  extern __shared__ __align__(16) uint8_t memory[];
  arch::let_next_kernel_start();
  using Piece = QueryPiece<T, D, kForm>;
  Piece(job, *reinterpret_cast<typename Piece::Shared*>(memory)).run();
}

}  // namespace sagebwd::cuda::sm90
