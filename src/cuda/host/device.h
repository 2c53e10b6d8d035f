// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <string>

namespace sagebwd::cuda {

/// Multiprocessors of the current device.
int multiprocessors();

/// Why the current device cannot run kernels for compute capabilities `least`.0 to `most`.x; empty
/// when it can. `only`: what to say if it is newer.
std::string decline_device(int least, int most = INT_MAX, const char* only = "");

}  // namespace sagebwd::cuda
