// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "half_types.h"

using __half = sagebwd::emulator::Half<sagebwd::f16>;
using __half2 = sagebwd::emulator::Half2<sagebwd::f16>;

inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return __half(x); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 a) { return {a.x, a.y}; }
