// SPDX-License-Identifier: Apache-2.0
// Kernels for x86-64 with AVX2, FMA and F16C.
#include <bit>
#include <cstring>
#include <limits>

#include "base/dispatch_dtype.h"
#include "base/half.h"
#include "base/inline.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/vec_avx2.h"
#include "numerics/quantize.h"
#include "numerics/rotate.h"

namespace sagebwd::cpu::isa::avx2 {
namespace {

inline constexpr int kRows = 4;  // register block of the INT8 products
inline constexpr int kPanels = 1;
inline constexpr int kFloatRows = 6;  // rows of the FP32 products
inline constexpr uint8_t kFlip = 0;
inline constexpr int kPLevels = 127;  // vpmaddubsw adds two products in 16 bits

inline IVec start_of(IVec) { return set1(0); }

/// Rows of a signed left operand, split for dot_split.
struct SplitRows {
  alignas(32) uint8_t magnitudes[kRows][kMostContract];
  alignas(32) uint8_t masks[kRows][kMostContract];
  int32_t offset[kRows];
  SplitRows(const Int8Product& p, int row) {
    const auto* at = static_cast<const int8_t*>(p.left) + row * p.left_stride;
    for (int r = 0; r < kRows; ++r)
      offset[r] = split_row(at + r * p.left_stride, p.k, magnitudes[r], masks[r]);
  }
  IVec start(int r, IVec column) const { return add(column, set1(offset[r])); }
  SplitQuad quad(int r, int k) const {
    return {broadcast_quad(magnitudes[r] + k), broadcast_quad(masks[r] + k)};
  }
  static IVec step(IVec acc, SplitQuad a, Quads b) { return dot_split(acc, a, b); }
};
#define SAGE_SPLIT_ROWS

#include "cpu/isa/gemm.inl"
#include "cpu/isa/prep.inl"
#include "cpu/isa/tile.inl"
// After tile.inl, whose exponential it takes.
#include "cpu/isa/linear.inl"
// Last: it names what the others define.
#include "cpu/isa/table.inl"

const char* unavailable() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? nullptr
                                                                         : "needs AVX2 and FMA";
}

}  // namespace

// Constant-initialised: no code with these instructions may run before the CPU was asked.
extern constinit const Kernels kTable = make_table("cpu-avx2", unavailable);

}  // namespace sagebwd::cpu::isa::avx2
