// SPDX-License-Identifier: Apache-2.0
// Conversion of one tensor, a block of 128 tokens of one head per thread block.
//
//   load → subtract mean → largest magnitude per token or per group of tokens → codes → row-major
//   rows
//                                                                              ↘ shared memory →
//                                                                              transposed rows
// Tokens that hold NaN or Inf have codes 0 and scale NaN, and do not touch the scale of their
// neighbours. The arithmetic is that of numerics/quantize.h, so codes equal the other backends' bit
// for bit.
#include "cuda/arch/scalar.cuh"
#include "cuda/host/launch.h"
#include "cuda/quantize/quantize.h"
#include "cuda/quantize/rows.cuh"

namespace sagebwd::cuda {
namespace {

// Scale groups in a block of tokens, when a group is 64 or 128 tokens.
constexpr int kMaxGroups = 2;

// Scale of Q or K for codes that are all zero. The backward folds scales into dS and takes them out
// again, so they must not vanish; being small, this one does not disturb the maxima of dS.
constexpr float kZeroScale = 0x1p-60f;

template <typename T, int D, int kTokens>
struct TokenBlock {
  using Type = T;
  static constexpr int kWidth = D;
  using Shape = RowShape<D, kTokens>;
  static constexpr int kLine =
      D + 4;  // bytes of a row of codes in shared memory; the odd word spreads banks

  struct Shared {
    alignas(16) uint8_t codes[kTokens * kLine];
    float group_amax[kMaxGroups];
    int group_bad[kMaxGroups];
  };

  tile::Sequence s;
  int head, first, count;  // first token of the block inside its sequence; tokens of the sequence
  int64_t padded;          // first token of the block in the workspace
  int row, channel;
  float mean[8];
  Chunk<T> chunk[Shape::kSteps];
  float amax[Shape::kSteps];
  bool bad[Shape::kSteps];

  __device__ int token(int step) const { return first + step * Shape::kRows + row; }
  __device__ int64_t slot(int step) const { return padded + step * Shape::kRows + row; }

  __device__ void load(const TokenJob& job, bool queries) {
    head = static_cast<int>(blockIdx.y);
    padded = static_cast<int64_t>(blockIdx.x) * kTokens;
    s = tile::sequence_of_block(job.seq, static_cast<int>(padded / kBlock), queries);
    first = static_cast<int>(padded - (queries ? s.q_pad : s.k_pad));
    count = queries ? s.nq : s.nk;
    const int64_t begin = queries ? s.q_begin : s.k_begin;
    row = static_cast<int>(threadIdx.x) / Shape::kLanes;
    channel = static_cast<int>(threadIdx.x) % Shape::kLanes * 8;
#pragma unroll
    for (int e = 0; e < 8; ++e) mean[e] = 0.0f;
    if (job.mean != nullptr)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        mean[e] = job.mean[(static_cast<int64_t>(s.index) * job.heads + head) * D + channel + e];
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      chunk[step].bits = make_uint4(0, 0, 0, 0);
      if (token(step) < count && channel < job.d)
        chunk[step] = load_chunk(tile::row_of<const T>(job.x, s, head, begin + token(step)),
                                 channel, job.x.vector);
    }
  }

  __device__ void smoothed(int step, float (&x)[8]) const {
    chunk[step].unpack(x);
    if (token(step) >= count)
      return;  // stays zero; so do channels beyond d, where the mean is zero
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] -= mean[e];
  }

  /// Largest magnitude and poison of each token, and of each group in shared memory.
  __device__ void measure(Shared& shared, int tokens_per_scale) {
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      float x[8];
      smoothed(step, x);
      float top = 0.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e) top = arch::max_nan(top, fabsf(x[e]));
      top = row_max_nan<Shape::kLanes>(top);
      bad[step] = !numerics::is_finite(top);
      amax[step] = bad[step] ? 0.0f : top;
    }
    if (tokens_per_scale == 1) return;
    if (threadIdx.x < kMaxGroups)
      shared.group_amax[threadIdx.x] = 0.0f, shared.group_bad[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      const int group = (step * Shape::kRows + row) / tokens_per_scale;
      if (channel == 0) {
        // Magnitudes are not negative, so their order is that of their bits.
        atomicMax(reinterpret_cast<int*>(&shared.group_amax[group]), __float_as_int(amax[step]));
        if (bad[step]) atomicOr(&shared.group_bad[group], 1);
      }
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step)
      amax[step] = shared.group_amax[(step * Shape::kRows + row) / tokens_per_scale];
  }

  /// Scale of a token; zero beyond the end.
  __device__ float scale(int step) const {
    if (token(step) >= count) return 0.0f;
    return bad[step] ? __int_as_float(0x7fffffff) : numerics::scale_of(amax[step]);
  }

  __device__ void write_codes(const TokenJob& job, Shared& shared) const {
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      const float inverse = bad[step] ? 0.0f : numerics::inverse_of(numerics::scale_of(amax[step]));
      float x[8];
      smoothed(step, x);
      uint32_t word[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        uint32_t c[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)  // round(x·inverse), two roundings as in numerics::code_nearest
          c[e] = __float_as_uint(__fadd_rn(__fmul_rn(x[4 * w + e], inverse), tile::kMagicFloat));
        word[w] = bad[step] ? 0 : tile::pack(c[0], c[1], c[2], c[3]);
      }
      if (job.codes != nullptr)
        *reinterpret_cast<uint2*>(job.codes + (head * job.tokens + slot(step)) * D + channel) =
            make_uint2(word[0], word[1]);
      if (job.codes_t != nullptr) {
        uint32_t* line = reinterpret_cast<uint32_t*>(shared.codes +
                                                     (step * Shape::kRows + row) * kLine + channel);
        line[0] = word[0], line[1] = word[1];
      }
    }
    if (job.codes_t == nullptr) return;
    __syncthreads();
    write_transposed(job, shared);
  }

  /// Each thread turns 16 tokens x 4 channels into four 16-byte pieces of transposed rows, in the
  /// order that 8-bit A operands made from accumulators want.
  __device__ void write_transposed(const TokenJob& job, const Shared& shared) const {
    constexpr int kItems = D / 4 * (kTokens / 16);
    const bool turned = job.for_turned;
    const auto token_at = [turned](int p) { return turned ? tile::turned(p) : tile::permuted(p); };
    const auto row_of = [turned](int ch) { return turned ? tile::turned_row(ch) : ch; };
    for (int item = static_cast<int>(threadIdx.x); item < kItems; item += Shape::kThreads) {
      const int piece = item % 4 + item / D * 4;  // 16 tokens
      const int c = item % D / 4 * 4;
      uint32_t out[4][4];  // [channel][word]
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          r[e] = *reinterpret_cast<const uint32_t*>(shared.codes +
                                                    (piece * 16 + token_at(4 * w + e)) * kLine + c);
        const uint32_t ab_low = __byte_perm(r[0], r[1], 0x5140),
                       cd_low = __byte_perm(r[2], r[3], 0x5140);
        const uint32_t ab_high = __byte_perm(r[0], r[1], 0x7362),
                       cd_high = __byte_perm(r[2], r[3], 0x7362);
        out[0][w] = __byte_perm(ab_low, cd_low, 0x5410);
        out[1][w] = __byte_perm(ab_low, cd_low, 0x7632);
        out[2][w] = __byte_perm(ab_high, cd_high, 0x5410);
        out[3][w] = __byte_perm(ab_high, cd_high, 0x7632);
      }
      const int64_t group = (head * job.tokens + padded) / kGroup + piece / (kGroup / 16);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        *reinterpret_cast<uint4*>(job.codes_t + (group * D + row_of(c + e)) * kGroup +
                                  piece % (kGroup / 16) * 16) =
            make_uint4(out[e][0], out[e][1], out[e][2], out[e][3]);
    }
  }

  __device__ void write_raw(const TokenJob& job, int step) const {
    *reinterpret_cast<uint4*>(static_cast<T*>(job.raw) + (head * job.tokens + slot(step)) * D +
                              channel) = chunk[step].bits;
  }
};

struct Keys {
  using Job = KeyJob;
  template <class Block>
  static __device__ void run(const Job& job, typename Block::Shared& shared) {
    Block b;
    b.load(job, false);
    b.measure(shared, job.tokens_per_scale);
#pragma unroll
    for (int step = 0; step < Block::Shape::kSteps; ++step)
      if (b.channel == 0) {
        // 22 significant bits, so that offset is exact.
        float scale = b.scale(step);
        if (numerics::is_finite(scale))
          scale = __uint_as_float((__float_as_uint(scale) + 2u) & ~3u);
        if (scale == 0.0f) scale = kZeroScale;
        job.scale[b.head * job.tokens + b.slot(step)] = {scale, -tile::kMagicFloat * scale};
      }
    b.write_codes(job, shared);
  }
};

struct Values {
  using Job = ValueJob;
  template <class Block>
  static __device__ void run(const Job& job, typename Block::Shared& shared) {
    Block b;
    b.load(job, false);
    if (job.scale != nullptr) {
      b.measure(shared, job.tokens_per_scale);
      b.write_codes(job, shared);
      const int groups = kBlock / job.tokens_per_scale;
      if (static_cast<int>(threadIdx.x) < groups)
        job.scale[(b.head * job.tokens + b.padded) / job.tokens_per_scale + threadIdx.x] =
            shared.group_bad[threadIdx.x] != 0 ? __int_as_float(0x7fffffff)
                                               : numerics::scale_of(shared.group_amax[threadIdx.x]);
    }
#pragma unroll
    for (int step = 0; step < Block::Shape::kSteps; ++step) {
      const int at = step * Block::Shape::kRows + b.row;
      const bool wanted = job.scale == nullptr ||
                          (b.first + at) / job.tokens_per_scale < job.raw_tiles ||
                          shared.group_bad[at / job.tokens_per_scale] != 0;
      if (wanted) b.write_raw(job, step);
    }
  }
};

struct Queries {
  using Job = QueryJob;
  template <class Block>
  static __device__ void run(const Job& job, typename Block::Shared& shared) {
    Block b;
    b.load(job, true);
    b.measure(shared, job.tokens_per_scale);
    float mu[8] = {};
    if (job.k_mean != nullptr)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        mu[e] = job.k_mean[(static_cast<int64_t>(b.s.index) * (job.heads / job.group) +
                            b.head / job.group) *
                               Block::kWidth +
                           b.channel + e];
    const float to_log2 = job.logit_scale * numerics::kLog2e;
#pragma unroll
    for (int step = 0; step < Block::Shape::kSteps; ++step) {
      float x[8];
      b.chunk[step].unpack(x);
      float dot = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) dot = fmaf(x[e], mu[e], dot);
      // The forward adds this number to LSE and the backward takes it off again: the same bits in
      // both.
      const float mean_logit = job.logit_scale * row_sum<Block::Shape::kLanes>(dot);
      if (b.channel != 0) continue;
      const int64_t at = b.head * job.tokens + b.slot(step);
      const float lane = b.scale(step) * to_log2;
      if (job.row == nullptr) {
        // A row of zeros has logits 0 under any scale; a positive one keeps masked logits at -inf.
        job.lane[at] = lane == 0.0f ? 1.0f : lane;
        job.mean_logit[at] = mean_logit;
        continue;
      }
      float lse2 = INFINITY;  // P = 0 in rows without keys and beyond the end
      if (b.token(step) < b.count) {
        const float lse = *tile::stat_of(job.lse, b.s, b.head, b.s.q_begin + b.token(step));
        if (lse != -INFINITY) lse2 = (lse - mean_logit) * numerics::kLog2e;
      }
      job.row[at].lane = lane == 0.0f ? kZeroScale : lane, job.row[at].lse2 = lse2;
    }
    b.write_codes(job, shared);
  }
};

struct Douts {
  using Job = DoutJob;
  template <class Block>
  static __device__ void run(const Job& job, typename Block::Shared& shared) {
    Block b;
    b.load(job, true);
    Chunk<typename Block::Type> out[Block::Shape::kSteps];  // of O, asked for together with dO
#pragma unroll
    for (int step = 0; step < Block::Shape::kSteps; ++step) {
      out[step].bits = make_uint4(0, 0, 0, 0);
      if (b.token(step) < b.count && b.channel < job.d)
        out[step] = load_chunk(tile::row_of<const typename Block::Type>(
                                   job.o, b.s, b.head, b.s.q_begin + b.token(step)),
                               b.channel, job.o.vector);
    }
    b.measure(shared, job.tokens_per_scale);
#pragma unroll
    for (int step = 0; step < Block::Shape::kSteps; ++step) {
      if (job.raw != nullptr) b.write_raw(job, step);
      const bool real = b.token(step) < b.count;
      const int64_t token = b.s.q_begin + b.token(step);
      float x[8], o[8];
      b.chunk[step].unpack(x);
      out[step].unpack(o);
      float dot = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) dot = fmaf(x[e], o[e], dot);
      dot = row_sum<Block::Shape::kLanes>(dot);
      if (b.channel != 0) continue;
      const int64_t at = b.head * job.tokens + b.slot(step);
      QueryRow& row = job.row[at];
      float delta = 0.0f;
      if (real && row.lse2 != INFINITY)
        delta =
            dot - (job.dlse.data != nullptr ? *tile::stat_of(job.dlse, b.s, b.head, token) : 0.0f);
      row.delta = delta;
      // A row with dO = 0 still has dS when dLSE is given, so its φ is small instead of zero.
      const float phi = b.scale(step) == 0.0f ? 0x1p-90f : b.scale(step);
      const float slope = row.lane / phi;
      job.exponent[at] = {row.lane, row.lse2 - log2f(phi)};
      job.gradient[at] = {slope, -delta * slope};
    }
    b.write_codes(job, shared);
  }
};

struct DocumentParams {
  DocumentChunk chunk;
  DocumentStart* to;
  int count;
};

__global__ void document_kernel(DocumentParams p) {
  if (static_cast<int>(threadIdx.x) < p.count) p.to[threadIdx.x] = p.chunk.start[threadIdx.x];
}

struct DecodeParams {
  const uint32_t* codes;
  float* out;
  int64_t count;
};

__global__ void decode_max_kernel(DecodeParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const uint32_t u = p.codes[i];
  p.out[i] = u == 0 ? -INFINITY : __uint_as_float(u & 0x80000000u ? u ^ 0x80000000u : ~u);
}

template <class Work, typename T, int D, int kTokens>
__global__ void __launch_bounds__(RowShape<D, kTokens>::kThreads, RowShape<D, kTokens>::kResident)
    token_kernel(typename Work::Job job) {
  using Block = TokenBlock<T, D, kTokens>;
  __shared__ typename Block::Shared shared;
  Work::template run<Block>(job, shared);
}

template <class Work, typename T, int D, int kTokens>
void run(const typename Work::Job& job, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(job.num_blocks * (kBlock / kTokens)),
                  static_cast<unsigned>(job.heads));
  launch(token_kernel<Work, T, D, kTokens>, grid, RowShape<D, kTokens>::kThreads, 0, job, stream);
}
template <class Work, typename T, int D>
void run(const typename Work::Job& job, cudaStream_t stream) {
  // Small thread blocks come and go at different times, which keeps the memory busy.
  job.tokens_per_scale == 1 ? run<Work, T, D, kGroup>(job, stream)
                            : run<Work, T, D, kBlock>(job, stream);
}
template <class Work>
void run(const typename Work::Job& job, Dtype dtype, cudaStream_t stream) {
  if (dtype == Dtype::bf16)
    job.padded_d == 64 ? run<Work, __nv_bfloat16, 64>(job, stream)
                       : run<Work, __nv_bfloat16, 128>(job, stream);
  else
    job.padded_d == 64 ? run<Work, __half, 64>(job, stream) : run<Work, __half, 128>(job, stream);
}

}  // namespace

void launch_keys(const KeyJob& job, Dtype dtype, cudaStream_t stream) {
  run<Keys>(job, dtype, stream);
}
void launch_values(const ValueJob& job, Dtype dtype, cudaStream_t stream) {
  run<Values>(job, dtype, stream);
}
void launch_queries(const QueryJob& job, Dtype dtype, cudaStream_t stream) {
  run<Queries>(job, dtype, stream);
}
void launch_dout(const DoutJob& job, Dtype dtype, cudaStream_t stream) {
  run<Douts>(job, dtype, stream);
}

void launch_documents(const DocumentChunk& chunk, DocumentStart* to, int count,
                      cudaStream_t stream) {
  launch(document_kernel, dim3(1), 256, 0, DocumentParams{chunk, to, count}, stream);
}

void launch_decode_max(const uint32_t* codes, float* out, int64_t count, cudaStream_t stream) {
  launch(decode_max_kernel, dim3(static_cast<unsigned>((count + 255) / 256)), 256, 0,
         DecodeParams{codes, out, count}, stream);
}

}  // namespace sagebwd::cuda
