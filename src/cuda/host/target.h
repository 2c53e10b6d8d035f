// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace sagebwd::cuda {

/// The most shared memory that a thread block may have on the current device, by the device and by
/// the target that the code which runs there was compiled for; 0 without a device.
int shared_memory_limit();

}  // namespace sagebwd::cuda
