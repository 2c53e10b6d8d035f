// SPDX-License-Identifier: Apache-2.0
// Which instance of the fused backward (config.cuh) the current device takes, and its launch.
#pragma once

#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/host/target.h"
#include "cuda/sm80/bwd/fused/kernel.cuh"
#include "cuda/sm80/bwd/launch.h"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda::sm80::fused_backward {

/// An instance, and the memory of the one that is taken instead where it fits.
template <Instance kInstance_, unsigned kWants_, int kLarger_>
struct Choice {
  static constexpr Instance kInstance = kInstance_;
  static constexpr unsigned kWants = kWants_;
  static constexpr int kLarger = kLarger_;
};

/// Calls `use` with the choice of the current device. What there is on Hopper alone has the large
/// instances, for which it has room.
template <unsigned kWants, int D, class Use>
void with_choice(Use use) {
  using enum Instance;
  constexpr bool kIsPaper = (kWants & kPaper) != 0, kPair = (kWants & kLists) != 0;
  constexpr Instance kLarge = D == 64    ? (kIsPaper ? paper_narrow : narrow)
                              : kIsPaper ? paper_wide
                              : kPair    ? wide_pair  // tiles of 64 keys lie within any block
                                         : wide,
                     kSmall = D == 64 ? (kIsPaper ? paper_narrow_small : narrow_small)
                                      : (kIsPaper ? paper_wide_small : wide_small);
  if constexpr ((kWants & kGeneral) == 0 || (kWants & kDitherDq) != 0) {
    use(Choice<kLarge, kWants, 0>());
  } else {
    constexpr int kTaken = kMemory<config_of(kLarge, kWants)>;
    if (kTaken <= shared_memory())
      use(Choice<kLarge, kWants, 0>());
    else
      use(Choice<kSmall, kWants, kTaken>());
  }
}

/// Launches the instance of a call.
template <unsigned kWants>
void run(const BackwardCall& call) {
  const BackwardParams& p = call.params;
  with_instance(call.dtype, call.padded_d, [&]<typename T, int D>() {
    with_choice<kWants, D>([&](auto choice) {
      using Choice = decltype(choice);
      constexpr Config kConfig = config_of(Choice::kInstance, kWants);
      const int64_t blocks = kConfig.lists() ? p.lists.lineups * p.lists.piece_places()
                                             : int64_t{call.k_blocks} * (kBlock / kConfig.tile_k());
      launch(fused_kernel<T, Choice::kInstance, kWants, Choice::kLarger>,
             dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.hk)), kConfig.threads(),
             static_cast<int>(sizeof(SharedPlan<kConfig>)), p, call.stream);
    });
  });
}
/// The same with or without kGeneral.
template <unsigned kWants>
void run_as_wanted(const BackwardCall& call) {
  call.params.general ? run<kWants | kGeneral>(call) : run<kWants>(call);
}

}  // namespace sagebwd::cuda::sm80::fused_backward
