// SPDX-License-Identifier: Apache-2.0
// cuda-plain pinned, and how near it is to the recipe oracle.
#pragma once

#include <string>

#include "device_case.h"

namespace sagebwd::gpu {

inline DeviceCase plain_case(const std::string& text) {
  DeviceCase dc(text);
  dc.impl = "cuda-plain";
  return dc;
}

/// The two sides differ by the rounding of the outputs and by a few codes of P and dS that are off
/// by one; in a short row one such code is an error of 1e-3. A wrong scale, a lost tile or a
/// swapped index is a hundred times larger.
inline double plain_budget(const DeviceCase& dc) {
  return dc.c.dtype == Dtype::f32 ? 1.5e-3 : dc.c.dtype == Dtype::f16 ? 1.5e-3 : 3e-3;
}

}  // namespace sagebwd::gpu
