// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/isa/kernels.h"
#include "spec/problem.h"

namespace sagebwd::cpu {

size_t forward_workspace(const isa::Kernels& kernels, const spec::Problem& p);
void forward(const isa::Kernels& kernels, const spec::Problem& p, const ForwardArgs& a,
             void* workspace);

}  // namespace sagebwd::cpu
