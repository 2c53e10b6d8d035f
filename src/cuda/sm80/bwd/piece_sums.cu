// SPDX-License-Identifier: Apache-2.0
// dK and dV of keys whose list was cut into pieces (cuda/lists). The sums of the pieces are added
// up in their order and go to the caller's tensors, those of dK with the rotation turned back. A
// thread takes eight channels of a key.
#include <algorithm>

#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/launch.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/layout.h"
#include "cuda/tile/rotate.cuh"
#include "cuda/tile/sequence.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kTileK = 64;

/// The sum over the pieces of a cut list, from the one of the first on.
template <int D>
__device__ void add_pieces(float (&x)[8], const float* from, int pieces) {
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = 0.0f;
  for (int piece = 0; piece < pieces; ++piece, from += 2 * kTileK * D) {
    const float4 a = reinterpret_cast<const float4*>(from)[0],
                 b = reinterpret_cast<const float4*>(from)[1];
    x[0] += a.x, x[1] += a.y, x[2] += a.z, x[3] += a.w;
    x[4] += b.x, x[5] += b.y, x[6] += b.z, x[7] += b.w;
  }
}

/// What store_dk does to sums (fused/products.cuh). All lanes of a row come here.
template <int D>
__device__ void finish_dk(float (&x)[8], uint32_t channel, int rotation) {
  float factor = static_cast<float>(numerics::kLn2);  // logit factors carry c·log2e
  if (rotation > 0) {
    factor *= numerics::rotation_unit(rotation);
    tile::hadamard_inside(x);
#pragma unroll
    for (int h = 8; h < D; h *= 2)
      if (h < rotation) tile::hadamard_across(x, h / 8, (channel & static_cast<uint32_t>(h)) != 0);
    tile::flip_signs(x, channel);
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= factor;
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads)
    piece_sums_kernel(const __grid_constant__ BackwardParams p) {
  constexpr uint32_t kLanes = D / 8, kPerTensor = kTileK * kLanes,
                     kParts = 2 * kPerTensor / kThreads;  // thread blocks of a tile
  static_assert(kPerTensor % kThreads == 0);
  const QueryLists& l = p.lists;
  const int64_t lineup = blockIdx.x;
  const uint32_t work = l.cut_count[lineup] * kParts;
  for (uint32_t i = blockIdx.y; i < work; i += gridDim.y) {
    const int64_t at = lineup * l.cut_places() + i / kParts;
    const Cut cut = l.cuts[at];
    if (cut.pieces == 0) continue;
    const uint32_t index = i % kParts * kThreads + threadIdx.x, channel = index % kLanes * 8,
                   row = index % kPerTensor / kLanes;
    const bool is_dk = index < kPerTensor;
    const int64_t first_key = int64_t{cut.key_tile} * kTileK;
    const tile::Sequence s =
        tile::sequence_of_block<kBlock>(p.seq, static_cast<int>(first_key / kBlock), false);
    const int kv_head = static_cast<int>(lineup / l.lineups);
    float x[8];
    add_pieces<D>(x, l.sums + (2 * at * kPerTensor + index) * 8, cut.pieces);
    if (is_dk) finish_dk<D>(x, channel, p.rotation);
    const int64_t key = first_key - s.k_pad + row;
    if (key >= s.nk || static_cast<int>(channel) >= p.d) continue;
    const Strided& to = is_dk ? p.dk : p.dv;
    tile::store_eight(tile::row_of<T>(to, s, kv_head, s.k_begin + key) + channel, x, to.vector);
  }
}

}  // namespace

void launch_piece_sums(const BackwardCall& call) {
  // Mostly there is little to do, or nothing: about as many thread blocks as a large GPU holds.
  constexpr int64_t kThreadBlocks = 1024;
  const BackwardParams& p = call.params;
  const int64_t lineups = p.hk * p.lists.lineups,
                each = std::max<int64_t>(kThreadBlocks / std::max<int64_t>(lineups, 1), 1);
  with_instance(call.dtype, call.padded_d, [&]<typename T, int D>() {
    launch(piece_sums_kernel<T, D>,
           dim3(static_cast<unsigned>(lineups), static_cast<unsigned>(each)), kThreads, 0, p,
           call.stream);
  });
}

}  // namespace sagebwd::cuda::sm80
