// SPDX-License-Identifier: Apache-2.0
// The lists of a problem in the form that their kernels take, and why some are declined.
#pragma once

#include <string>

#include "cuda/host/views.h"
#include "cuda/lists/lists.h"
#include "spec/problem.h"

namespace sagebwd::cuda {

/// tq, tk: padded totals. tile_q, tile_k: queries and keys of a tile.
inline ListJob list_job(const spec::Problem& p, const Sequences& seq, int64_t tq, int64_t tk,
                        int tile_q, int tile_k) {
  const BlockLists& l = p.blocks;
  return {.seq = seq,
          .mask = mask_of(p),
          .index = l.index,
          .count = l.count,
          .width = l.width,
          .rows = l.rows,
          .stride_batch = l.stride_batch,
          .stride_head = l.stride_head,
          .block_q = l.block_q,
          .block_k = l.block_k,
          .lead = p.lifted(kMatmulO) ? -1 : l.lead,
          .tile_q = tile_q,
          .tile_k = tile_k,
          .h = static_cast<int>(p.h),
          .group = p.hk > 0 ? static_cast<int>(p.group()) : 1,
          .tq = tq,
          .tk = tk};
}

/// Why no kernel takes the lists of a problem; empty when they do.
inline std::string decline_lists(const spec::Batch& p) {
  if (!p.has_lists()) return "";
  if (!p.blocks.on_device) return "takes block lists on the device only (blocks.on_device)";
  if (p.blocks.offset != nullptr)
    return "takes block lists with rows of one width, not with offsets";
  return "";
}

}  // namespace sagebwd::cuda
