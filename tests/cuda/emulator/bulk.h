// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory and the bulk copies that report to them. A copy happens at once or,
// with late copies, when somebody waits for its barrier and nothing else is missing.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace sagebwd::emulator {

void init_barrier(uint32_t barrier, int arrivals);
/// `bytes`: that copies will bring; 0: none are announced.
void arrive_at_barrier(uint32_t barrier, uint32_t bytes);
void wait_for_barrier(uint32_t barrier, uint32_t parity);

void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
/// A box of a tensor, from these coordinates on; what is outside the tensor is zero.
void copy_box(uint32_t to, const CUtensorMap& map, const int (&first)[5], uint32_t barrier);

}  // namespace sagebwd::emulator
