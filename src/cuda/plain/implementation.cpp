// SPDX-License-Identifier: Apache-2.0
#include "cuda/plain/implementation.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "cuda/host/blocks.h"
#include "cuda/host/device.h"
#include "cuda/lists/job.h"
#include "cuda/plain/params.h"
#include "cuda/plain/run.h"

namespace sagebwd::cuda::plain {
namespace {

std::string decline(const spec::Problem& p) {
  if (p.device != Device::cuda) return "runs on CUDA memory only";
  if (const std::string reason = decline_lists(p); !reason.empty()) return reason;
  if (p.packed() && p.documents.on_device) return "takes document offsets on the host only";
  // One grid dimension holds all blocks of all heads.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMostTokens = int64_t{1} << 30;  // places in a sequence are 32-bit numbers
  if (p.num_sequences() > kMost || p.num_sequences() * std::max<int64_t>(p.hk, 1) > kMost)
    return "takes up to 2^31 sequences times key heads";
  const int64_t count = p.packed() ? p.documents.count : std::min<int64_t>(p.b, 1);
  for (int64_t t = 0; t < count; ++t) {
    const spec::Sequence s = p.sequence(t);
    if (std::max(s.nq, s.nk) > kMostTokens) return "takes up to 2^30 tokens of a sequence";
  }
  const Blocks blocks(p, kBlock);
  if (blocks.q * p.h > kMost || blocks.k * p.hk > kMost)
    return "takes up to 2^31 blocks of 64 tokens, over all heads";
  if (std::string reason = decline_device(8); !reason.empty()) return reason;
  return decline_slow_int8();
}

}  // namespace

const backend::Implementation& implementation() {
  static const backend::Implementation impl{
      .name = "cuda-plain",
      .decline = decline,
      .tiles = tiles_of,
      .workspace = workspace_of,
      .forward = forward,
      .backward = backward,
  };
  return impl;
}

}  // namespace sagebwd::cuda::plain
