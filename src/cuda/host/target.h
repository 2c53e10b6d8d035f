// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace sagebwd::cuda {

/// Shared memory of a multiprocessor of the current device, or of the target that the code which
/// runs there was made for, if that has less; 0 without a device.
int shared_memory();

}  // namespace sagebwd::cuda
