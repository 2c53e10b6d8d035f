// SPDX-License-Identifier: Apache-2.0
// Which instance of the fused backward (config.cuh) the current device takes, and its launch.
#pragma once

#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/host/target.h"
#include "cuda/sm80/bwd/fused/kernel.cuh"
#include "cuda/sm80/bwd/launch.h"
#include "cuda/tile/layout.h"
#include "sagebwd/recipe.h"

namespace sagebwd::cuda::sm80::fused_backward {

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
template <Policy kPolicy, Scheme kScheme, int D, class Use>
auto with_choice(Use use) {
  using enum Instance;
  constexpr bool kLists = kPolicy == Policy::lists || kPolicy == Policy::general_lists;
  if constexpr (kLists && D == 128)  // tiles of 64 keys lie within any block
    return first_that_fits<kPolicy, 0, wide_pair, wide_small>(use);
  else if constexpr (kScheme == Scheme::vectorwise && D == 64)
    return first_that_fits<kPolicy, 0, narrow, narrow_small>(use);
  else if constexpr (kScheme == Scheme::vectorwise)
    return first_that_fits<kPolicy, 0, wide, wide_small>(use);
  else if constexpr (D == 64)
    return first_that_fits<kPolicy, 0, paper_narrow, paper_narrow_small>(use);
  else
    return first_that_fits<kPolicy, 0, paper_wide, paper_wide_small, paper_wide_tiny>(use);
}

/// Launches the instance of a call.
template <Policy kPolicy, Scheme kScheme>
void run(const BackwardCall& call) {
  const BackwardParams& p = call.params;
  with_instance(call.dtype, call.padded_d, [&]<typename T, int D>() {
    with_choice<kPolicy, kScheme, D>([&](auto choice) {
      using Choice = decltype(choice);
      constexpr Config kConfig = config_of(Choice::kInstance, kPolicy);
      const int64_t blocks = kConfig.lists ? p.lists.lineups * p.lists.piece_places()
                                           : int64_t{call.k_blocks} * (kBlock / kConfig.tile_k());
      launch(fused_kernel<T, Choice::kInstance, kPolicy, Choice::kLarger>,
             dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.hk)), kConfig.threads(),
             static_cast<int>(sizeof(SharedPlan<kConfig>)), p, call.stream);
    });
  });
}

}  // namespace sagebwd::cuda::sm80::fused_backward
