// SPDX-License-Identifier: Apache-2.0
// Launches the fused backward: which instance of fused/config.cuh the current device takes.
#include "cuda/host/launch.h"
#include "cuda/host/target.h"
#include "cuda/sm80/bwd/fused/kernel.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {
namespace {

using namespace fused_backward;

/// Shared memory of a multiprocessor that an instance takes.
template <Instance kInstance, Policy kPolicy>
inline constexpr int kTaken = kMemory<config_of(kInstance, kPolicy)>;

/// An instance, and the memory of the one that is taken instead where it fits.
template <Instance kInstance_, Policy kPolicy_, int kLarger_>
struct Choice {
  static constexpr Instance kInstance = kInstance_;
  static constexpr Policy kPolicy = kPolicy_;
  static constexpr int kLarger = kLarger_;
};
/// The first instance that fits; the last one always does. kLarger: memory of the one before.
template <Policy kPolicy, int kLarger, Instance kFirst, Instance... kRest, class Use>
auto first_that_fits(Use use) {
  if constexpr (sizeof...(kRest) == 0)
    return use(Choice<kFirst, kPolicy, kLarger>());
  else
    return kTaken<kFirst, kPolicy> <= shared_memory()
               ? use(Choice<kFirst, kPolicy, kLarger>())
               : first_that_fits<kPolicy, kTaken<kFirst, kPolicy>, kRest...>(use);
}

/// Calls `use` with the choice of the current device.
template <int D, Policy kPolicy, class Use>
auto with_paper(Use use) {
  using enum Instance;
  if constexpr (D == 64)
    return first_that_fits<kPolicy, 0, paper_narrow, paper_narrow_small>(use);
  else
    return first_that_fits<kPolicy, 0, paper_wide, paper_wide_small, paper_wide_tiny>(use);
}
template <int D, Policy kPolicy, class Use>
auto with_choice(Scheme scheme, Use use) {
  using enum Instance;
  if (scheme == Scheme::paper) return with_paper<D, kPolicy>(use);
  if constexpr (D == 64)
    return first_that_fits<kPolicy, 0, narrow, narrow_small>(use);
  else
    return first_that_fits<kPolicy, 0, wide, wide_small>(use);
}

template <typename T, class Choice>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  constexpr Config kConfig = config_of(Choice::kInstance, Choice::kPolicy);
  launch(fused_kernel<T, Choice::kInstance, Choice::kPolicy, Choice::kLarger>,
         dim3(static_cast<unsigned>(k_blocks * (kBlock / kConfig.tile_k())),
              static_cast<unsigned>(p.hk)),
         kConfig.threads(), static_cast<int>(sizeof(SharedPlan<kConfig>)), p, stream);
}

}  // namespace

BackwardTiles fused_tiles(Scheme scheme, int padded_d) {
  const auto tiles = [](auto choice) {
    constexpr Config kConfig = config_of(decltype(choice)::kInstance, Policy::fast);
    return BackwardTiles{kConfig.tile_q(), kConfig.tile_k()};
  };
  return padded_d == 64 ? with_choice<64, Policy::fast>(scheme, tiles)
                        : with_choice<128, Policy::fast>(scheme, tiles);
}

template <typename T, int D>
void launch_fused(const BackwardParams& p, Scheme scheme, Rounding rounding, int k_blocks,
                  cudaStream_t stream) {
  const auto use = [&](auto choice) { run<T, decltype(choice)>(p, k_blocks, stream); };
  if (rounding == Rounding::dither)
    with_paper<D, Policy::dither>(use);
  else if (p.turns != nullptr || p.row_sum != nullptr || p.k_per_token)
    with_choice<D, Policy::general>(scheme, use);
  else
    with_choice<D, Policy::fast>(scheme, use);
}

template void launch_fused<__nv_bfloat16, 64>(const BackwardParams&, Scheme, Rounding, int,
                                              cudaStream_t);
template void launch_fused<__nv_bfloat16, 128>(const BackwardParams&, Scheme, Rounding, int,
                                               cudaStream_t);
template void launch_fused<__half, 64>(const BackwardParams&, Scheme, Rounding, int, cudaStream_t);
template void launch_fused<__half, 128>(const BackwardParams&, Scheme, Rounding, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
