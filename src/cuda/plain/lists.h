// SPDX-License-Identifier: Apache-2.0
// Block lists as bits, for kernels that ask of every tile whether it is listed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/lists/lists.h"

namespace sagebwd::cuda::plain {

/// A bit per block of keys of all sequences. The mask has no part in them.
struct ListBits {
  uint32_t *listed, *leading;  // [h, q blocks, words]; leading: of entries whose P is not quantised
  int64_t words;
};
void launch_list_bits(const ListJob& job, const ListBits& to, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
