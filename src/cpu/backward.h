// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/isa/kernels.h"
#include "spec/problem.h"

namespace sagebwd::cpu {

size_t backward_workspace(const isa::Kernels& kernels, const spec::Problem& p);
void backward(const isa::Kernels& kernels, const spec::Problem& p, const BackwardArgs& a,
              void* workspace);

}  // namespace sagebwd::cpu
