// SPDX-License-Identifier: Apache-2.0
// Sizes of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "cuda/host/params.h"
#include "dispatch/implementation.h"
#include "spec/problem.h"

namespace sagebwd::cuda {

/// Blocks of tokens, and the padded totals: upper bounds when the documents are on the device.
struct Plan {
  explicit Plan(const spec::Problem& p);

  int padded_d;
  int num_sequences;
  int q_blocks, k_blocks;                // of kBlock tokens, all sequences
  int64_t tq, tk;                        // padded tokens
  std::vector<DocumentStart> documents;  // [count + 1] when packed, with offsets on the host
};

/// Whether dQ is added up in memory by the kernel that makes dK and dV, rather than by its own.
bool fused(const spec::Problem& p);

dispatch::Tiles tiles_of(const spec::Problem& p);
size_t workspace_of(const spec::Problem& p);
void forward(const spec::Problem& p, const ForwardArgs& args, void* workspace);
void backward(const spec::Problem& p, const BackwardArgs& args, void* workspace);

}  // namespace sagebwd::cuda
