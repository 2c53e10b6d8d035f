// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward kernel, and their choice.
#include "cuda/host/launch.h"
#include "cuda/host/target.h"
#include "cuda/sm80/bwd/fused/kernel.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {
namespace {

// d 64: three small thread blocks on a multiprocessor, 60 KB each. Where there is no room for
// three, two of 48 KB: fewer warps have more registers, enough to hold K and V.
using Narrow = FusedShape<64, false, 4, 2, 1, 2, false, 3>;
using NarrowSmall = FusedShape<64, false, 4, 2, 1, 2, true, 2>;
// d 128: one thread block with three stages in 216 KB; where there is less, half the keys and one
// stage.
using Wide = FusedShape<128, false, 8, 2, 3, 3, false, 1>;
using WideSmall = FusedShape<128, false, 4, 2, 1, 1, false, 1>;
// `paper` has tiles of its own, 128 queries x 64 keys: two thread blocks of 102 KB at d 64, or one
// that holds K and V; 174 KB at d 128, or 142 with one stage.
using PaperNarrow = FusedShape<64, true, 8, 4, 1, 2, false, 2>;
using PaperNarrowSmall = FusedShape<64, true, 8, 4, 1, 2, true, 1>;
using PaperWide = FusedShape<128, true, 8, 4, 1, 2, false, 1>;
using PaperWideSmall = FusedShape<128, true, 8, 4, 1, 1, false, 1>;

template <class Shape>
bool fits() {
  return kFusedMemory<Shape> <= shared_memory();
}
/// A shape, and the one that is taken instead where it fits.
template <class Shape_, class Larger_ = Shape_>
struct Choice {
  using Shape = Shape_;
  using Larger = Larger_;
};
template <class Large, class Small, class Use>
auto larger_that_fits(Use use) {
  return fits<Large>() ? use(Choice<Large>()) : use(Choice<Small, Large>());
}

/// Calls `use` with the choice of the current device.
template <int D, class Use>
auto with_choice(bool paper, Use use) {
  if constexpr (D == 64)
    return paper ? larger_that_fits<PaperNarrow, PaperNarrowSmall>(use)
                 : larger_that_fits<Narrow, NarrowSmall>(use);
  else
    return paper ? larger_that_fits<PaperWide, PaperWideSmall>(use)
                 : larger_that_fits<Wide, WideSmall>(use);
}

template <typename T, class Choice>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  using Shape = typename Choice::Shape;
  launch(
      fused_kernel<T, Shape, typename Choice::Larger>,
      dim3(static_cast<unsigned>(k_blocks * (kBlock / Shape::kTileK)), static_cast<unsigned>(p.hk)),
      Shape::kThreads, static_cast<int>(sizeof(FusedShared<Shape>)), p, stream);
}

}  // namespace

bool fused_fits(bool paper, int padded_d) {
  return padded_d == 64 || !paper || fits<PaperWideSmall>();
}

BackwardTiles fused_tiles(bool paper, int padded_d) {
  const auto tiles = [](auto choice) {
    using Shape = typename decltype(choice)::Shape;
    return BackwardTiles{Shape::kTileQ, Shape::kTileK};
  };
  return padded_d == 64 ? with_choice<64>(paper, tiles) : with_choice<128>(paper, tiles);
}

template <typename T, int D>
void launch_fused(const BackwardParams& p, bool paper, int k_blocks, cudaStream_t stream) {
  with_choice<D>(paper, [&](auto choice) { run<T, decltype(choice)>(p, k_blocks, stream); });
}

template void launch_fused<__nv_bfloat16, 64>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_fused<__nv_bfloat16, 128>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_fused<__half, 64>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_fused<__half, 128>(const BackwardParams&, bool, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
