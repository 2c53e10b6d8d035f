// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "half_types.h"

using __nv_bfloat16 = sagebwd::emulator::Half<sagebwd::bf16>;
using __nv_bfloat162 = sagebwd::emulator::Half2<sagebwd::bf16>;

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
