// SPDX-License-Identifier: Apache-2.0
// The linear branch (sagebwd/linear.h) in FP32.
#pragma once

#include "cpu/isa/kernels.h"
#include "spec/problem.h"

namespace sagebwd::cpu {

size_t linear_workspace(const spec::Problem& p);
void linear_forward(const isa::Kernels& kernels, const spec::Problem& p, const LinearForwardArgs& a,
                    void* workspace);
void linear_backward(const isa::Kernels& kernels, const spec::Problem& p,
                     const LinearBackwardArgs& a, void* workspace);

}  // namespace sagebwd::cpu
