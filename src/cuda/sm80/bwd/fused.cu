// SPDX-License-Identifier: Apache-2.0
// Launches the fused backward: which instance of fused/config.cuh the current device takes.
#include "cuda/host/launch.h"
#include "cuda/host/target.h"
#include "cuda/sm80/bwd/fused/kernel.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {
namespace {

using namespace fused_backward;

/// An instance, and the memory of the one that is taken instead where it fits.
template <Instance kInstance_, int kLarger_ = 0>
struct Choice {
  static constexpr Instance kInstance = kInstance_;
  static constexpr int kLarger = kLarger_;
};
template <Instance kInstance>
bool fits() {
  return kMemory<kInstance> <= shared_memory();
}
template <Instance kLarge, Instance kSmall, class Use>
auto larger_that_fits(Use use) {
  return fits<kLarge>() ? use(Choice<kLarge>()) : use(Choice<kSmall, kMemory<kLarge>>());
}

/// Calls `use` with the choice of the current device.
template <int D, class Use>
auto with_choice(bool paper, Use use) {
  if constexpr (D == 64)
    return paper ? larger_that_fits<Instance::paper_narrow, Instance::paper_narrow_small>(use)
                 : larger_that_fits<Instance::narrow, Instance::narrow_small>(use);
  else
    return paper ? larger_that_fits<Instance::paper_wide, Instance::paper_wide_small>(use)
                 : larger_that_fits<Instance::wide, Instance::wide_small>(use);
}

template <typename T, class Choice>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  constexpr Config kConfig = config_of(Choice::kInstance);
  launch(fused_kernel<T, Choice::kInstance, Choice::kLarger>,
         dim3(static_cast<unsigned>(k_blocks * (kBlock / kConfig.tile_k())),
              static_cast<unsigned>(p.hk)),
         kConfig.threads(), static_cast<int>(sizeof(SharedPlan<kConfig>)), p, stream);
}

}  // namespace

bool fused_fits(bool paper, int padded_d) {
  return padded_d == 64 || !paper || fits<Instance::paper_wide_small>();
}

BackwardTiles fused_tiles(bool paper, int padded_d) {
  const auto tiles = [](auto choice) {
    constexpr Config kConfig = config_of(decltype(choice)::kInstance);
    return BackwardTiles{kConfig.tile_q(), kConfig.tile_k()};
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
