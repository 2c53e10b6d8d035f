// SPDX-License-Identifier: Apache-2.0
// A strided tensor in memory of its own, with guards before and behind it. Every byte that is not
// an element keeps a known pattern, so that a stray write shows.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "sagebwd/types.h"

namespace sagebwd::testing {

using Shape = std::array<int64_t, 4>;

/// Where the elements of a tensor lie in its memory.
struct Placement {
  Shape stride{};      // in elements
  int64_t offset = 0;  // elements between the guard and the first element
};

Placement dense(const Shape& shape);                // [b, h, n, d]
Placement tokens_before_heads(const Shape& shape);  // [b, n, h, d]

class Tensor {
 public:
  static constexpr int64_t kGuard = 512;  // elements

  /// `fill` is the byte everything starts as; 0xFF makes every element NaN.
  Tensor(Dtype dtype, const Shape& shape, const Placement& place, int64_t guard = kGuard,
         unsigned char fill = 0xFF);

  TensorView view() const;
  StatsView stats() const;  // of a [b, h, n, 1] tensor of FP32
  int64_t count() const { return shape_[0] * shape_[1] * shape_[2] * shape_[3]; }

  /// Values in the order of a contiguous tensor, rounded to the element type. Elements that share
  /// an address (stride 0) must have the same value.
  void set(const std::vector<float>& values);
  std::vector<float> get() const;

  /// What was written where no element lies; empty when nothing was.
  std::string stray_write() const;
  /// A copy of all memory, guards included.
  std::vector<unsigned char> bytes() const { return {memory_.get(), memory_.get() + size_}; }

 private:
  template <typename F>
  void for_each(F f) const;  // f(contiguous index, byte offset)

  Dtype dtype_;
  Shape shape_;
  Placement place_;
  int64_t guard_;
  unsigned char fill_;
  int64_t size_;  // bytes
  std::unique_ptr<unsigned char[]> memory_;
};

}  // namespace sagebwd::testing
