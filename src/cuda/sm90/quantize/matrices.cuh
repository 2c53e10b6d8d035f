// SPDX-License-Identifier: Apache-2.0
// Constant operands of the products: the rotation and the identity, by which tokens are multiplied.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/arch/shared_memory.cuh"
#include "cuda/arch/wgmma.cuh"
#include "numerics/rotate.h"

namespace sagebwd::cuda::sm90::codes {

/// The number 1 in 16 bits.
template <typename T>
inline constexpr uint32_t kOne = std::is_same_v<T, __nv_bfloat16> ? 0x3f80u : 0x3c00u;

/// Q and K are multiplied by diag(signs)·H. Its numbers are 1 and -1, so products are exact. The
/// Hadamard matrix of 128 channels is
///
///   H₁₂₈ = | H₆₄  H₆₄ |     so both panels of a token meet H₆₄, and the second panel of the result
///          | H₆₄ -H₆₄ |     takes what comes from the second with a minus.
///
/// V is multiplied by the identity: this brings it to the same registers, in FP32, without
/// instructions that unpack it.
///
/// A matrix has a row per channel of the result, in an order that gives a lane neighbouring
/// channels: row 8·j + 2·t + e is channel 16·t + 2·j + e of a panel, and lane t of four has columns
/// 8·j + 2·t + e of a product (arch/wgmma.cuh).
template <typename T, int D>
struct Matrices {
  static constexpr int kBytes = 64 * 128;
  alignas(1024) uint8_t rotation[D / 64][kBytes];  // for each panel of a token
  alignas(1024) uint8_t identity[kBytes];

  __device__ void fill() {
    for (uint32_t i = threadIdx.x; i < 64 * 32; i += blockDim.x) {
      const uint32_t row = i / 32, k = i % 32 * 2,
                     channel = row / 2 % 4 * 16 + row / 8 * 2 + row % 2,
                     at = arch::swizzled<128>(row * 128 + k * 2);
      const uint32_t odd = __popc(k & channel) & 1u, next_odd = odd ^ (channel & 1u);
#pragma unroll
      for (int panel = 0; panel < D / 64; ++panel) {
        const int first = panel * 64 + static_cast<int>(k);
        const uint32_t sign = odd ^ (numerics::rotation_flips(first) ? 1u : 0u),
                       next = next_odd ^ (numerics::rotation_flips(first + 1) ? 1u : 0u);
        *reinterpret_cast<uint32_t*>(rotation[panel] + at) =
            kOne<T> | kOne<T> << 16 | sign << 15 | next << 31;
      }
      *reinterpret_cast<uint32_t*>(identity + at) = k == channel       ? kOne<T>
                                                    : k + 1 == channel ? kOne<T> << 16
                                                                       : 0u;
    }
  }
};

}  // namespace sagebwd::cuda::sm90::codes
