// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "emulator/block.h"

namespace sagebwd::cuda::arch {

using emulator::shared_address, emulator::shared_pointer;

inline void cp_async_16(uint32_t to, const void* from) { emulator::start_copy(to, from, 16, true); }
inline void cp_async_16_if(bool wanted, uint32_t to, const void* from) {
  if (wanted) cp_async_16(to, from);
}
inline void cp_async_16_or_zero(uint32_t to, const void* from, bool real) {
  emulator::start_copy(to, from, 16, real);
}
inline void cp_async_16_once_or_zero(uint32_t to, const void* from, bool real) {
  cp_async_16_or_zero(to, from, real);
}
inline void cp_async_4(uint32_t to, const void* from) { emulator::start_copy(to, from, 4, true); }
inline void cp_async_8(uint32_t to, const void* from) { emulator::start_copy(to, from, 8, true); }
inline void cp_async_8_or_zero(uint32_t to, const void* from, bool real) {
  emulator::start_copy(to, from, 8, real);
}
inline void cp_async_commit() { emulator::close_copies(); }
template <int kPending>
void cp_async_wait() {
  emulator::wait_for_copies(kPending);
}

inline void shared_writes_done() {}

struct MatrixLoad {
  uint32_t address;  // of one row
  uint32_t* r;       // [4]
};

/// Matrix i lies in the rows of lanes 8i … 8i + 7; lane 4g + t gets elements 2t, 2t + 1 of row g
/// or, transposed, of column g.
template <bool kTransposed>
void load_matrices(emulator::Lanes<MatrixLoad> all) {
  const uint16_t* row[emulator::kLanes];
  for (unsigned lane = 0; lane < emulator::kLanes; ++lane)
    row[lane] = static_cast<const uint16_t*>(emulator::shared_pointer(all[lane].address, 16));
  for (unsigned lane = 0; lane < emulator::kLanes; ++lane)
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned g = lane / 4, t = lane % 4;
      const uint16_t* const* matrix = row + 8 * i;
      const uint32_t low = kTransposed ? matrix[2 * t][g] : matrix[g][2 * t],
                     high = kTransposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      all[lane].r[i] = low | high << 16;
    }
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  MatrixLoad mine{address, r};
  emulator::meet(mine, load_matrices<false>);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  MatrixLoad mine{address, r};
  emulator::meet(mine, load_matrices<true>);
}

struct MatrixStore {
  uint32_t address;  // of one row
  uint32_t r[4];
};
inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                              uint32_t r3) {
  MatrixStore mine{address, {r0, r1, r2, r3}};
  emulator::meet<MatrixStore>(mine, [](emulator::Lanes<MatrixStore> all) {
    for (unsigned lane = 0; lane < emulator::kLanes; ++lane)
      for (unsigned i = 0; i < 4; ++i)
        for (unsigned e = 0; e < 2; ++e) {
          const unsigned g = lane / 4, row = lane % 4 * 2 + e;
          static_cast<uint16_t*>(emulator::shared_pointer(all[8 * i + row].address, 16))[g] =
              static_cast<uint16_t>(all[lane].r[i] >> (16 * e));
        }
  });
}

}  // namespace sagebwd::cuda::arch
