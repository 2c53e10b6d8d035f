// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "backend/implementation.h"
#include "spec/problem.h"

namespace sagebwd::cuda::sm90 {

backend::Tiles tiles_of(const spec::Problem& p);
size_t workspace_of(const spec::Problem& p);
void forward(const spec::Problem& p, const ForwardArgs& args, void* workspace);
void backward(const spec::Problem& p, const BackwardArgs& args, void* workspace);

}  // namespace sagebwd::cuda::sm90
