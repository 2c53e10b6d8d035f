// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "backend/implementation.h"
#include "cuda/sm90/quantize/job.h"
#include "cuda/sm90/workspace.h"
#include "cuda/tuned/call.h"
#include "spec/problem.h"

namespace sagebwd::cuda::sm90 {

/// What the kernel of codes is told by every call, before its outputs.
CodesJob codes_job(const tuned::Call& call, const tuned::SharedSpace& ws,
                   const CentreRows& centre_rows, tuned::Item* items);

backend::Tiles tiles_of(const spec::Problem& p);
size_t workspace_of(const spec::Problem& p);
void forward(const spec::Problem& p, const ForwardArgs& args, void* workspace);
void backward(const spec::Problem& p, const BackwardArgs& args, void* workspace);

}  // namespace sagebwd::cuda::sm90
