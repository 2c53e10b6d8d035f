// SPDX-License-Identifier: Apache-2.0
// From what a call says at run time to the instance of a kernel: its type and head dimension.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sagebwd/types.h"

namespace sagebwd::cuda {

/// Calls use.operator()<T>() with the 16-bit type of `dtype`.
template <class Use>
void with_type(Dtype dtype, Use use) {
  dtype == Dtype::bf16 ? use.template operator()<__nv_bfloat16>()
                       : use.template operator()<__half>();
}

/// Calls use.operator()<D>() with the padded head dimension, 64 or 128.
template <class Use>
void with_head_dim(int padded_d, Use use) {
  padded_d == 64 ? use.template operator()<64>() : use.template operator()<128>();
}

/// Both: use.operator()<T, D>().
template <class Use>
void with_instance(Dtype dtype, int padded_d, Use use) {
  with_type(dtype, [&]<typename T>() {
    with_head_dim(padded_d, [&]<int D>() { use.template operator()<T, D>(); });
  });
}

}  // namespace sagebwd::cuda
