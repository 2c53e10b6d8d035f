// SPDX-License-Identifier: Apache-2.0
// The operand kernel of quantize/ as sm90 runs it on saved codes.
#pragma once

#include "cuda/quantize/quantize.h"

namespace sagebwd::emulator {

void launch_operands_read(const cuda::OperandJob& job, Dtype dtype);

}  // namespace sagebwd::emulator
