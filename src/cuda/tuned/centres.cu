// SPDX-License-Identifier: Apache-2.0
// The centres of K and V: a thread block makes one, of an octave, from 128 tokens at most. Each
// depends on the sampled tokens alone, added up in an order that nothing else changes: it is
// rounded to codes, and one bit of a sum might become one of a code.
#include "cuda/arch/kernel_order.cuh"
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tuned/centres.h"
#include "cuda/tuned/lone_row.cuh"
#include "cuda/tuned/long_sum.cuh"
#include "cuda/tuned/rows.cuh"
#include "numerics/octaves.h"
#include "numerics/quantize.h"

namespace sagebwd::cuda::tuned {
namespace {

constexpr int kThreads = 256;

/// Neighbouring lanes share keys; each has eight channels.
template <int D>
struct Shape {
  static constexpr int kLanes = D / 8, kSlots = kThreads / kLanes,
                       kSteps = numerics::kMostSampled / kSlots;  // keys of a slot
};

template <int D>
struct Shared {
  double sums[Shape<D>::kSlots][D];
  int counts[Shape<D>::kSlots];
  double energies[kThreads / 32];
  float row[D];
  uint32_t tops[D / 32];
};

template <typename T>
__device__ Chunk<T> chunk_at(const T* from, bool vector) {
  Chunk<T> chunk;
  if (vector) {
    chunk.bits = __ldcg(reinterpret_cast<const uint4*>(from));
  } else {
    T* v = reinterpret_cast<T*>(&chunk.bits);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = from[e];
  }
  return chunk;
}

/// The sum over all threads.
template <int D>
__device__ double sum_of_all(double x, Shared<D>& shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  if (threadIdx.x % 32 == 0) shared.energies[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (double each : shared.energies) sum += each;
  return sum;
}

/// The mean of a sample of K or V, in the channel that is the thread's index. Tokens that hold NaN
/// or Inf are left out; it is zero if there are no others, and in channels behind the last.
/// excess: a part of the energy of the mean beyond kLeastCentreShare of that of the tokens.
template <typename T, int D>
__device__ float mean_of(const Strided& from, int d, const tile::Sequence& s, int head,
                         const numerics::Sample& sample, Shared<D>& shared, double& excess) {
  using S = Shape<D>;
  const int thread = static_cast<int>(threadIdx.x), slot = thread / S::kLanes,
            channel = thread % S::kLanes * 8, lane = thread % 32;
  const auto chunk_of = [&](int step) {
    const int n = step * S::kSlots + slot;
    Chunk<T> chunk;
    chunk.bits = make_uint4(0, 0, 0, 0);
    if (n < sample.count && channel < d)
      chunk = chunk_at(tile::row_of<const T>(from, s, head, s.k_begin + sample.key(n)) + channel,
                       from.vector);
    return chunk;
  };
  LongSum sum[8];
  float square = 0.0f;
#pragma unroll 2
  for (int step = 0; step < S::kSteps; ++step) {
    float x[8];
    chunk_of(step).unpack(x);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e].add(x[e]), square = fmaf(x[e], x[e], square);
  }
  double total[8];
  bool bad = false;
#pragma unroll
  for (int e = 0; e < 8; ++e) total[e] = sum[e].value(), bad |= !(fabs(total[e]) <= kLargestSum);
  int count = 0;
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) count += step * S::kSlots + slot < sample.count;
  if (__syncthreads_or(bad)) {
    // Again without the keys that hold NaN or Inf. The others may be of any size.
    count = 0, square = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] = 0.0;
#pragma unroll 1
    for (int step = 0; step < S::kSteps; ++step) {
      float x[8];
      chunk_of(step).unpack(x);
      bool poisoned = step * S::kSlots + slot >= sample.count;
#pragma unroll
      for (int e = 0; e < 8; ++e) poisoned |= !numerics::is_finite(x[e]);
      const uint32_t votes = __ballot_sync(0xffffffffu, poisoned);
      if ((votes >> (lane / S::kLanes * S::kLanes) & ((1u << S::kLanes) - 1)) != 0) continue;
      ++count;
#pragma unroll
      for (int e = 0; e < 8; ++e)
        total[e] += static_cast<double>(x[e]), square = fmaf(x[e], x[e], square);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) shared.sums[slot][channel + e] = total[e];
  if (channel == 0) shared.counts[slot] = count;
  __syncthreads();
  excess = -numerics::kLeastCentreShare * static_cast<double>(square);
  if (thread >= D) return 0.0f;
  double all = 0;
  int keys = 0;
#pragma unroll 4
  for (int i = 0; i < S::kSlots; ++i) all += shared.sums[i][thread], keys += shared.counts[i];
  const float mean = keys > 0 ? static_cast<float>(all / static_cast<double>(keys)) : 0.0f;
  excess += keys * (static_cast<double>(mean) * static_cast<double>(mean));
  return mean;
}

/// Zeros for a channel of V, and for a scale, of octaves without a centre.
__device__ void clear_columns(__nv_bfloat16* row, float* scale, int channel, int octaves) {
#pragma unroll 1
  for (int octave = 0; octave < kCentreRows; ++octave) {
    if (octave >= numerics::kFirstValueCentre && octave < octaves) continue;
    row[octave] = __nv_bfloat16(0.0f);
    if (channel == 0) scale[octave] = 0.0f;
  }
}

/// The centre of an octave of a head of a sequence.
template <typename T, int D>
__device__ void make_centre(const CentreJob& job, bool of_v, Shared<D>& shared) {
  const int index = static_cast<int>(blockIdx.x) / job.octaves,
            octave = static_cast<int>(blockIdx.x) - index * job.octaves,
            head = static_cast<int>(blockIdx.y), channel = static_cast<int>(threadIdx.x);
  const tile::Sequence s = tile::sequence_at<kBlock>(job.seq, index);
  const int octaves = numerics::octaves_of(s.nk);
  const int64_t of_head = (static_cast<int64_t>(index) * job.hk + head) * kCentreRows;
  auto* columns = reinterpret_cast<__nv_bfloat16*>(job.columns.codes);
  if (columns != nullptr) columns += of_head * D + static_cast<int64_t>(channel) * kCentreRows;
  if (of_v && octave == 0 && columns != nullptr && channel < D)
    clear_columns(columns, job.columns.scale + of_head, channel, octaves);
  if (octave >= octaves) return;
  const Centres& to = of_v ? job.of_v : job.of_k;
  const int64_t row = to.row(head, s.k_pad / kBlock, numerics::first_block_of(octave));
  const bool real = channel < job.d;
  float x = 0.0f;
  if (!job.zero && !(of_v && octave < numerics::kFirstValueCentre)) {
    double excess;
    x = mean_of<T, D>(of_v ? job.v : job.k, job.d, s, head, numerics::centre_sample(octave), shared,
                      excess);
    if (of_v && !(sum_of_all(excess, shared) >= 0.0)) x = 0.0f;
    if (!of_v && job.rotation > 0)
      x = hadamard_row(shared.row, flipped(x, channel), channel, job.rotation, real);
  }
  if (channel < D) {
    const uint32_t top = __reduce_max_sync(0xffffffffu, __float_as_uint(real ? fabsf(x) : 0.0f));
    if (channel % 32 == 0) shared.tops[channel / 32] = top;
  }
  __syncthreads();
  if (!real) return;
  uint32_t top = 0;  // bits of magnitudes have their order, with NaN on top
#pragma unroll
  for (uint32_t most : shared.tops) top = max(top, most);
  const float scale = numerics::scale_of(__uint_as_float(top));
  const auto code = static_cast<int8_t>(numerics::code_nearest(x, numerics::inverse_of(scale)));
  to.codes[row * job.d + channel] = code;
  if (channel == 0) to.scale[row] = scale;
  if (of_v) {
    if (columns == nullptr || octave < numerics::kFirstValueCentre) return;
    columns[octave] = __nv_bfloat16(static_cast<float>(code));
    if (channel == 0) job.columns.scale[of_head + octave] = scale;
  } else {
    if (job.rows.codes == nullptr) return;
    job.rows.codes[(of_head + octave) * D + channel] = code;
    if (channel == 0) job.rows.scale[of_head + octave] = scale;
  }
}

/// Many thread blocks share a multiprocessor, because each mostly waits: for its keys, and for its
/// own threads.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads, 6)
    centre_kernel(const __grid_constant__ CentreJob job) {
  __shared__ Shared<D> shared;
  arch::let_next_kernel_start();
  make_centre<T, D>(job, blockIdx.z != 0, shared);
  arch::wait_for_earlier_kernels();  // for whoever waits for this one
}

}  // namespace

void launch_centres(const CentreJob& job, Dtype dtype, int padded_d, cudaStream_t stream,
                    Start start) {
  const dim3 grid(static_cast<unsigned>(job.seq.count * job.octaves), static_cast<unsigned>(job.hk),
                  2);
  with_instance(dtype, padded_d, [&]<typename T, int D>() {
    launch(centre_kernel<T, D>, grid, kThreads, 0, job, stream, start);
  });
}

}  // namespace sagebwd::cuda::tuned
