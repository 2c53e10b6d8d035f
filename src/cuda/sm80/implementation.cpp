// SPDX-License-Identifier: Apache-2.0
// What these kernels serve, and why they decline the rest.
#include "cuda/sm80/implementation.h"

#include <algorithm>
#include <sstream>
#include <string>

#include "cuda/host/device.h"
#include "cuda/host/target.h"
#include "cuda/lists/job.h"
#include "cuda/sm80/run.h"
#include "cuda/sm80/tiles.h"
#include "cuda/tile/layout.h"
#include "cuda/tuned/plan.h"

namespace sagebwd::cuda::sm80 {
namespace {

/// The matmuls of the call whose operand is rounded by dither.
uint32_t dithered_in(const spec::Problem& p) {
  const uint32_t here = p.direction == spec::Direction::forward
                            ? uint32_t{kMatmulO}
                            : kMatmulDitherable & ~uint32_t{kMatmulO};
  return p.recipe.rounding == Rounding::dither ? p.recipe.dithered & here : 0;
}

std::string decline_dither(const spec::Problem& p) {
  const uint32_t dithered = dithered_in(p);
  if (dithered == 0) return "";
  if (p.recipe.scheme == Scheme::paper || dithered != kMatmulDQ)
    return "has dither of dQ alone, in recipe vectorwise";
  return made_for_hopper() ? "" : "has dither on Hopper only";
}

std::string decline_cap(const spec::Problem& p) {
  if (!p.capped()) return "";
  if (p.recipe.scheme == Scheme::paper) return "has soft capping in recipe vectorwise only";
  if (dithered_in(p) != 0) return "has no dither with soft capping";
  if (p.has_lists()) return "has no block lists with soft capping";
  if (p.d > 64 && !decline_device(8, 11, "newer").empty())  // arch::caps
    return "has soft capping at head dims up to 64 on this GPU";
  // The backward finds the slope of the cap from P and LSE, which small caps leave too few digits.
  return p.softcap < 1.0f ? "takes soft caps from 1 up" : "";
}

std::string decline_these_lists(const spec::Problem& p) {
  constexpr int64_t kMostEntries = int64_t{1} << 31;
  if (!p.has_lists()) return "";
  if (const std::string reason = decline_lists(p); !reason.empty()) return reason;
  const BlockLists& l = p.blocks;
  if (p.recipe.scheme == Scheme::paper) return "has block lists in recipe vectorwise only";
  if (dithered_in(p) != 0) return "has no dither with block lists";
  const int64_t rows = p.group() * tuned::Plan(p).tq / kListedQueries * (l.block_k / 64);
  if (l.width >= kMostEntries / std::max<int64_t>(rows, 1))
    return "takes up to 2^31 tiles of block lists per key head";
  return "";
}

std::string decline(const spec::Problem& p) {
  constexpr int64_t kMostHeads = 65535, kMostTokens = int64_t{1} << 29;
  const Recipe& r = p.recipe;
  if (p.device != Device::cuda) return "runs on CUDA memory only";
  if (p.dtype == Dtype::f32) return "takes bf16 and f16, not f32";
  if (p.dv != p.d) return "takes v of the head dim of q and k";
  if (p.d > kMostHeadDim) return "takes head dims up to " + std::to_string(kMostHeadDim);
  if (p.scale < 0.0f) return "takes positive logit scales only";
  if (const std::string reason = decline_cap(p); !reason.empty()) return reason;
  if (r.smooth_q) return "has no Q-smoothing";
  if (const std::string reason = decline_dither(p); !reason.empty()) return reason;
  if ((r.high_precision & ~static_cast<uint32_t>(kMatmulO)) != 0)
    return "can lift only O = PV out of INT8";
  // Keys without queries still have gradients, of zeros, which the plain kernels write.
  if (p.h == 0) return "takes at least one query head";
  if (p.h > kMostHeads) return "takes up to 65535 heads";
  const int64_t most_padded =
      p.packed() ? p.nq + p.num_sequences() * kBlock : p.b * (p.nq + kBlock);
  if (most_padded > kMostTokens * kBlock || p.nq > kMostTokens || p.nk > kMostTokens)
    return "takes up to 2^29 tokens of a sequence and 2^36 in all";
  if (const std::string reason = decline_these_lists(p); !reason.empty()) return reason;
  const backend::Tiles t = tiles_of(p);
  const bool backward = p.direction == spec::Direction::backward;
  // Only scales and the count of 16-bit tiles depend on tiles: in a forward only `paper` has such
  // along the queries.
  const bool q_matters = backward || r.scheme == Scheme::paper;
  if ((r.tile_q != 0 && r.tile_q != t.q && q_matters) || (r.tile_k != 0 && r.tile_k != t.k)) {
    std::ostringstream s;
    s << "has tiles of " << t.q << "x" << t.k << " for this call";
    return s.str();
  }
  if (std::string reason = decline_device(8); !reason.empty()) return reason;
  return decline_slow_int8();
}

}  // namespace

const backend::Implementation& implementation() {
  static const backend::Implementation impl{
      .name = "cuda-sm80",
      .decline = decline,
      .tiles = tiles_of,
      .workspace = workspace_of,
      .forward = forward,
      .backward = backward,
  };
  return impl;
}

}  // namespace sagebwd::cuda::sm80
