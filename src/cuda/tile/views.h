// SPDX-License-Identifier: Apache-2.0
// The caller's tensors, as they cross from host to device.
#pragma once

#include <cstdint>

namespace sagebwd::cuda {

/// A tensor of the caller's, [b, h, n, d] with unit channel stride.
struct Strided {
  void* data;
  int64_t batch, head, token;  // strides in elements
  bool vector;  // rows are aligned for vector access: 16 bytes of an input, 4 of an output
};

/// FP32 statistics of the caller's, [b, h, n].
struct StridedStats {
  float* data;
  int64_t batch, head, token;
};

}  // namespace sagebwd::cuda
