// SPDX-License-Identifier: Apache-2.0
// The emulated GPU: one that runs the code this program was compiled for.
#pragma once

namespace sagebwd::emulator {

/// __CUDA_ARCH__ of the kernels: 800 for sm_80, 1200 for sm_120.
int target();

/// Shared memory of a multiprocessor. SAGEBWD_EMULATOR_SHARED_MEMORY, in bytes, asks for a GPU that
/// runs the same code with less.
int shared_memory();

/// What a thread block may have of it.
int shared_memory_of_block();

}  // namespace sagebwd::emulator
