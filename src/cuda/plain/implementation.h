// SPDX-License-Identifier: Apache-2.0
// cuda-plain: every feature of the library on a GPU, written for clarity. It serves what the tuned
// kernels decline.
#pragma once

#include "backend/implementation.h"

namespace sagebwd::cuda::plain {

const backend::Implementation& implementation();

}  // namespace sagebwd::cuda::plain
