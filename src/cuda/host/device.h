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

/// Why a GPU of this compute capability should not run INT8 attention; empty when it should.
std::string slow_int8(int major, int minor);
/// The same of the current device. Nothing is declined once SAGEBWD_IMPL names an implementation.
std::string decline_slow_int8();

}  // namespace sagebwd::cuda
