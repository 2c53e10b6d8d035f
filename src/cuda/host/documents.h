// SPDX-License-Identifier: Apache-2.0
// The table of documents on the device, and the tokens that none of them holds.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/blocks.h"
#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "spec/problem.h"

namespace sagebwd::cuda {

/// Fills the table of a packed batch, [count + 1]. Offsets on the host are passed by value: nothing
/// has to outlive the call, and a captured graph keeps its own copy. Offsets on the device cannot
/// be checked, so they are clamped: in the table, documents follow one another and end within the
/// tensors.
void write_documents(const spec::Problem& p, const Blocks& blocks, DocumentStart* to,
                     cudaStream_t stream);

/// Zeroes the rows of tokens before the first document and after the last one, and sets their
/// statistics to -inf. The tensors have 16-bit elements.
struct UncoveredJob {
  const DocumentStart* documents;
  int count, d;
  struct Rows {
    Strided x;  // data null: nothing to do
    int64_t tokens;
    int heads;
    bool queries;
  } rows[3];
  StridedStats lse;  // of rows[0]; data null: none
};
void launch_uncovered(const UncoveredJob& job, cudaStream_t stream);

}  // namespace sagebwd::cuda
