// SPDX-License-Identifier: Apache-2.0
// The linear branch (sagebwd/linear.h) in FP32.
#pragma once

#include "cpu/isa/kernels.h"
#include "spec/linear.h"

namespace sagebwd::cpu::sla2 {

size_t linear_workspace(const spec::LinearProblem& p);
void linear_forward(const isa::Kernels& kernels, const spec::LinearProblem& p,
                    const LinearForwardArgs& a, void* workspace);
void linear_backward(const isa::Kernels& kernels, const spec::LinearProblem& p,
                     const LinearBackwardArgs& a, void* workspace);

}  // namespace sagebwd::cpu::sla2
