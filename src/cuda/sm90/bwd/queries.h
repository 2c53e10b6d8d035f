// SPDX-License-Identifier: Apache-2.0
// Operands of a backward that reads saved codes of K and V in place, in two launches: the largest
// scales of K and V, and all that follows from queries.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/quantize/quantize.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm90 {

/// Whether this serves the call. Rows of dO and O have to be aligned for vector access, and nothing
/// is packed where keys are ready.
inline bool has_only_queries(const OperandJob& job) {
  return job.backward && job.keys_are_ready && job.seq.documents == nullptr && job.dout.vector &&
         job.o.vector;
}

void launch_queries(const OperandJob& job, Dtype dtype, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm90
