// SPDX-License-Identifier: Apache-2.0
// One place that turns a Dtype value into a C++ type.
#pragma once

#include <utility>

#include "base/half.h"
#include "base/inline.h"
#include "sagebwd/types.h"

namespace sagebwd {

/// Calls f(T{}) with T the storage type of `dtype`.
template <typename F>
SAGE_INLINE decltype(auto) with_dtype(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::bf16:
      return std::forward<F>(f)(bf16{});
    case Dtype::f16:
      return std::forward<F>(f)(f16{});
    case Dtype::f32:
      break;
  }
  return std::forward<F>(f)(float{});
}

}  // namespace sagebwd
