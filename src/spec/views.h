// SPDX-License-Identifier: Apache-2.0
// Checks of the caller's tensors. They throw Error(invalid_argument), which names the tensor.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "sagebwd/types.h"

namespace sagebwd::spec {

std::string show(const std::array<int64_t, 4>& a);

void check_pointer(const char* name, const void* data, int64_t alignment, int64_t bytes = 1);
void check_shape(const char* name, const TensorView& t, Dtype dtype, std::array<int64_t, 4> shape);
void check_view(const char* name, const TensorView& t, Dtype dtype, std::array<int64_t, 4> shape,
                bool written, bool check_memory);
void check_stats(const char* name, const StatsView& s, std::array<int64_t, 3> shape, bool written,
                 bool check_memory);

}  // namespace sagebwd::spec
