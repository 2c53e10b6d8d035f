// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace sagebwd::cuda {

/// Multiprocessors of the current device.
int multiprocessors();

/// Why the current device cannot run kernels for compute capability `major`.0; empty when it can.
std::string decline_device(int major);

}  // namespace sagebwd::cuda
