// SPDX-License-Identifier: Apache-2.0
// cuda-plain: every feature of the library on a GPU, written for clarity. It serves what the tuned
// kernels decline, and is their witness.
#pragma once

#include <string>

#include "dispatch/implementation.h"

namespace sagebwd::cuda::plain {

/// Why the problem cannot be served on any device; empty when it can.
std::string decline(const spec::Problem& p);
dispatch::Tiles tiles_of(const spec::Problem& p);
size_t workspace_of(const spec::Problem& p);
void forward(const spec::Problem& p, const ForwardArgs& args, void* workspace);
void backward(const spec::Problem& p, const BackwardArgs& args, void* workspace);

}  // namespace sagebwd::cuda::plain
