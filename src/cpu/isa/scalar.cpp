// SPDX-License-Identifier: Apache-2.0
// Portable kernels: plain C++, whatever the compiler makes of it.
#include <bit>
#include <cstring>
#include <limits>

#include "base/dispatch_dtype.h"
#include "base/half.h"
#include "base/inline.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/vec_scalar.h"
#include "numerics/quantize.h"
#include "numerics/rotate.h"

namespace sagebwd::cpu::isa::scalar {
namespace {

inline constexpr int kRows = 4;  // register block of the INT8 products
inline constexpr int kPanels = 1;
inline constexpr int kFloatRows = 4;  // rows of the FP32 products
inline constexpr uint8_t kFlip = 0;
inline constexpr int kPLevels = 255;

inline IVec start_of(IVec) { return set1(0); }

#include "cpu/isa/gemm.inl"
#include "cpu/isa/prep.inl"
#include "cpu/isa/tile.inl"
// After tile.inl, whose exponential it takes.
#include "cpu/isa/linear.inl"
// Last: it names what the others define.
#include "cpu/isa/table.inl"

const char* unavailable() { return nullptr; }

}  // namespace

// Constant-initialised: no code with these instructions may run before the CPU was asked.
extern constinit const Kernels kTable = make_table("cpu-scalar", unavailable);

}  // namespace sagebwd::cpu::isa::scalar
