// SPDX-License-Identifier: Apache-2.0
// What these kernels serve, and why they decline the rest.
#include "cuda/sm90/implementation.h"

#include <string>

#include "cuda/host/device.h"
#include "cuda/lists/job.h"
#include "cuda/sm90/bwd/bwd.h"
#include "cuda/sm90/fwd/fwd.h"
#include "cuda/sm90/run.h"
#include "cuda/sm90/workspace.h"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda::sm90 {
namespace {

std::string decline_these_lists(const spec::Problem& p) {
  if (!p.has_lists()) return "";
  if (p.direction == spec::Direction::backward) return "has block lists in the forward only";
  if (const std::string reason = decline_lists(p); !reason.empty()) return reason;
  if (p.d != kListedForwardD) return "takes block lists with head dim 128";
  if (p.blocks.block_q % kBlock != 0) return "takes block lists whose block_q is a multiple of 128";
  if (p.recipe.tile_k != 0 && listed_keys(p) != kBlock)
    return "has two blocks of 64 keys in a tile, whatever tile_k is";
  return "";
}

std::string decline(const spec::Problem& p) {
  const Recipe& r = p.recipe;
  if (p.device != Device::cuda) return "runs on CUDA memory only";
  const bool backward = p.direction == spec::Direction::backward;
  if (p.dtype == Dtype::f32) return "takes bf16 and f16, not f32";
  if (p.dv != p.d) return "takes v of the head dim of q and k";
  if (p.d != 64 && p.d != 128) return "takes head dims 64 and 128";
  if (r.scheme == Scheme::paper) return "has recipe vectorwise";
  if (p.scale < 0.0f) return "takes positive logit scales only";
  if (p.capped()) return "has no soft capping: cuda-sm80 serves it";
  if (r.smooth_q) return "has no Q-smoothing";
  if (r.rounding == Rounding::dither) return "rounds to nearest only";
  if (r.high_precision != 0) return "has all matmuls but dP in INT8";
  if (p.h == 0 || p.nq == 0 || p.nk == 0) return "takes at least one query head, query and key";
  // Copies count rows of all heads in 31 bits.
  const int64_t padded = p.packed() ? p.num_sequences() * kBlock : p.b * kBlock;
  const int64_t rows = (p.packed() ? p.nq : p.b * p.nq) + padded,
                keys = (p.packed() ? p.nk : p.b * p.nk) + padded;
  if (p.h * rows * 2 > INT32_MAX || p.hk * keys * 2 > INT32_MAX)
    return "takes up to 2^30 tokens times heads";
  if (const std::string reason = decline_these_lists(p); !reason.empty()) return reason;
  const backend::Tiles t = tiles_of(p);
  if ((r.tile_k != 0 && r.tile_k != t.k) || (backward && r.tile_q != 0 && r.tile_q != t.q))
    return "has tiles of " + std::to_string(t.q) + "x" + std::to_string(t.k);
  return decline_device(9, 9, "runs on Hopper only");
}

}  // namespace

backend::Tiles tiles_of(const spec::Problem& p) {
  const bool backward = p.direction == spec::Direction::backward;
  backend::Tiles t{backward ? backward_queries(static_cast<int>(p.d)) : 64,
                   p.has_lists() ? listed_keys(p) : kBlock, 255};
  if (backward) t.dk_q = kSlab;
  return t;
}

const backend::Implementation& implementation() {
  static const backend::Implementation impl{
      .name = "cuda-sm90",
      .decline = decline,
      .tiles = tiles_of,
      .workspace = workspace_of,
      .forward = forward,
      .backward = backward,
  };
  return impl;
}

}  // namespace sagebwd::cuda::sm90
