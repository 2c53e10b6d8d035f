// SPDX-License-Identifier: Apache-2.0
// The linear branch on a GPU. jobs.h has the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "spec/linear.h"

namespace sagebwd::cuda::sla2::linear {

/// Bytes for the heads that are worked on at once, unless one head needs more. Tests make it small.
extern int64_t most_bytes;
/// From so many pieces of tokens on, a thread block takes several one after the other, which hides
/// the time of copying them. With fewer, they would not keep a GPU busy. Tests make it small.
extern int64_t many_pieces;

/// Why these kernels do not serve a problem; empty when they do.
std::string decline(const spec::LinearProblem& p);

size_t workspace_of(const spec::LinearProblem& p);
void forward(const spec::LinearProblem& p, const LinearForwardArgs& args, void* workspace);
void backward(const spec::LinearProblem& p, const LinearBackwardArgs& args, void* workspace);

}  // namespace sagebwd::cuda::sla2::linear
