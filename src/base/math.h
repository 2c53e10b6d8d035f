// SPDX-License-Identifier: Apache-2.0
// Integer helpers.
#pragma once

#include <cstdint>

namespace sagebwd {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/// Rounds towards minus infinity, for b > 0.
constexpr int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace sagebwd
