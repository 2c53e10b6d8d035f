// SPDX-License-Identifier: Apache-2.0
// Kernels for x86-64 with AVX-512 and VNNI; a second table has the product of AVX512-BF16 too.
#include <bit>
#include <cstring>
#include <limits>

#include "base/dispatch_dtype.h"
#include "base/half.h"
#include "base/inline.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/vec_avx512.h"
#include "numerics/quantize.h"
#include "numerics/rotate.h"

namespace sagebwd::cpu::isa::avx512 {
namespace {

inline constexpr int kRows = 4;  // register block of the INT8 products
inline constexpr int kPanels = 4;
inline constexpr int kFloatRows = 4;  // rows of the FP32 products
inline constexpr uint8_t kFlip = 0x80;
inline constexpr int kPLevels = 255;

inline IVec start_of(IVec sum) {
  return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 7));
}

#include "cpu/isa/gemm.inl"
// After gemm.inl, whose register blocks it shares.
#include "cpu/isa/gemm_bf16.inl"
#include "cpu/isa/prep.inl"
#include "cpu/isa/tile.inl"
// After tile.inl, whose exponential it takes.
#include "cpu/isa/linear.inl"
// Last: it names what the others define.
#include "cpu/isa/table.inl"

const char* vnni_unavailable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512vnni")
             ? nullptr
             : "needs AVX-512 F, BW, DQ, VL and VNNI";
}

const char* bf16_unavailable() {
  if (vnni_unavailable() != nullptr) return vnni_unavailable();
  return __builtin_cpu_supports("avx512bf16") ? nullptr : "needs AVX512-BF16";
}

}  // namespace

// Constant-initialised: no code with these instructions may run before the CPU was asked.
extern constinit const Kernels kTable = make_table("cpu-avx512-vnni", vnni_unavailable);
extern constinit const Kernels kBf16Table =
    make_table("cpu-avx512-bf16", bf16_unavailable, store_bf16);

}  // namespace sagebwd::cpu::isa::avx512
