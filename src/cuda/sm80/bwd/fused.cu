// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward kernel, and their choice.
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/fused.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {
namespace {

// d 64: three small thread blocks on a multiprocessor, 59 KB each.
using Narrow = FusedShape<64, 4, 1, 2, 3>;
// d 128: one thread block with three stages in 214 KB; where there is less, half the keys and one
// stage.
using Wide = FusedShape<128, 8, 3, 3, 1>;
using WideSmall = FusedShape<128, 4, 1, 1, 1>;

bool fits(size_t bytes) { return static_cast<int>(bytes) <= shared_memory_limit(); }

template <typename T, class Shape>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  launch(
      fused_kernel<T, Shape>,
      dim3(static_cast<unsigned>(k_blocks * (kBlock / Shape::kTileK)), static_cast<unsigned>(p.hk)),
      Shape::kThreads, static_cast<int>(sizeof(FusedShared<Shape>)), p, stream);
}

}  // namespace

BackwardTiles fused_tiles(int padded_d) {
  if (padded_d == 64) return {Narrow::kTileQ, Narrow::kTileK};
  return fits(sizeof(FusedShared<Wide>)) ? BackwardTiles{Wide::kTileQ, Wide::kTileK}
                                         : BackwardTiles{WideSmall::kTileQ, WideSmall::kTileK};
}

template <typename T, int D>
void launch_fused(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  if constexpr (D == 64)
    run<T, Narrow>(p, k_blocks, stream);
  else if (fits(sizeof(FusedShared<Wide>)))
    run<T, Wide>(p, k_blocks, stream);
  else
    run<T, WideSmall>(p, k_blocks, stream);
}

template void launch_fused<__nv_bfloat16, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_fused<__nv_bfloat16, 128>(const BackwardParams&, int, cudaStream_t);
template void launch_fused<__half, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_fused<__half, 128>(const BackwardParams&, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
