// SPDX-License-Identifier: Apache-2.0
// CUDA's 16-bit types over those of base/half.h.
#pragma once

#include "base/half.h"
#include "emulator/vector_types.h"

namespace sagebwd::emulator {

template <typename Storage>
struct Half {
  Half() = default;
  explicit Half(float x) : bits(from_float<Storage>(x).bits) {}
  operator float() const { return to_float(Storage{bits}); }
  uint16_t bits;
};
template <typename Storage>
struct alignas(4) Half2 {
  Half<Storage> x, y;
};

/// Both magnitudes, and both maxima, which keep NaN.
template <typename Storage>
Half2<Storage> __habs2(Half2<Storage> a) {
  a.x.bits &= 0x7fff, a.y.bits &= 0x7fff;
  return a;
}
template <typename Storage>
Half<Storage> max_nan(Half<Storage> a, Half<Storage> b) {
  return !(a >= b) && a == a ? b : a;
}
template <typename Storage>
Half2<Storage> __hmax2_nan(Half2<Storage> a, Half2<Storage> b) {
  return {max_nan(a.x, b.x), max_nan(a.y, b.y)};
}

}  // namespace sagebwd::emulator
