// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace sagebwd::cuda {

/// Bytes of shared memory per multiprocessor that a kernel can count on: those of the current
/// device, or of the target that its code was compiled for if that has fewer. 0 without a device.
int shared_memory();

/// Whether the kernels here were compiled for Hopper.
bool made_for_hopper();

/// Whether kernels here may start early (Start in launch.h): their code can wait for those before.
bool can_start_early();

}  // namespace sagebwd::cuda
