// SPDX-License-Identifier: Apache-2.0
// The caller's tensors and mask in the form that kernels take.
#pragma once

#include <cstdint>

#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "spec/problem.h"

namespace sagebwd::cuda {

/// `bytes`: the alignment that vector access to the rows needs.
inline Strided strided(const TensorView& t, int64_t bytes) {
  const auto aligned = [&](int64_t stride) { return stride * dtype_size(t.dtype) % bytes == 0; };
  return {t.data, t.stride[0], t.stride[1], t.stride[2],
          reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(bytes) == 0 &&
              aligned(t.stride[0]) && aligned(t.stride[1]) && aligned(t.stride[2])};
}
/// Rows are read 16 bytes at a time and written 4 at a time.
inline Strided input(const TensorView& t) { return strided(t, 16); }
inline Strided output(const TensorView& t) { return strided(t, 4); }

inline StridedStats stats(const StatsView& s) {
  return {s.data, s.stride[0], s.stride[1], s.stride[2]};
}

inline MaskParams mask_of(const spec::Problem& p) {
  return {p.align == Align::bottom_right, p.left, p.right};
}

}  // namespace sagebwd::cuda
