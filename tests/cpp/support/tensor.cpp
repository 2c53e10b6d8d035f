// SPDX-License-Identifier: Apache-2.0
#include "support/tensor.h"

#include <cstring>
#include <stdexcept>

#include "base/dispatch_dtype.h"

namespace sagebwd::testing {

Placement dense(const Shape& s) { return {{s[1] * s[2] * s[3], s[2] * s[3], s[3], 1}, 0}; }

Placement tokens_before_heads(const Shape& s) {
  return {{s[1] * s[2] * s[3], s[3], s[1] * s[3], 1}, 0};
}

Tensor::Tensor(Dtype dtype, const Shape& shape, const Placement& place, int64_t guard,
               unsigned char fill)
    : dtype_(dtype), shape_(shape), place_(place), guard_(guard), fill_(fill) {
  int64_t span = count() == 0 ? 0 : 1;
  for (size_t i = 0; i < 4 && span > 0; ++i)
    if (shape[i] > 1) span += (shape[i] - 1) * place.stride[i];
  size_ = (2 * guard + place.offset + span) * dtype_size(dtype);
  memory_ = std::make_unique_for_overwrite<unsigned char[]>(static_cast<size_t>(size_));
  std::memset(memory_.get(), fill, static_cast<size_t>(size_));
}

TensorView Tensor::view() const {
  return {memory_.get() + (guard_ + place_.offset) * dtype_size(dtype_), dtype_, shape_,
          place_.stride};
}

StatsView Tensor::stats() const {
  return {static_cast<float*>(view().data), {place_.stride[0], place_.stride[1], place_.stride[2]}};
}

template <typename F>
void Tensor::for_each(F f) const {
  int64_t index = 0;
  for (int64_t b = 0; b < shape_[0]; ++b)
    for (int64_t h = 0; h < shape_[1]; ++h)
      for (int64_t n = 0; n < shape_[2]; ++n)
        for (int64_t c = 0; c < shape_[3]; ++c, ++index) {
          const int64_t element = guard_ + place_.offset + b * place_.stride[0] +
                                  h * place_.stride[1] + n * place_.stride[2] + c;
          f(index, element * dtype_size(dtype_));
        }
}

void Tensor::set(const std::vector<float>& values) {
  if (static_cast<int64_t>(values.size()) != count())
    throw std::logic_error("Tensor::set: wrong number of values");
  with_dtype(dtype_, [&](auto type) {
    for_each([&](int64_t i, int64_t at) {
      const auto x = from_float<decltype(type)>(values[i]);
      std::memcpy(memory_.get() + at, &x, sizeof x);
    });
  });
}

std::vector<float> Tensor::get() const {
  std::vector<float> out(static_cast<size_t>(count()));
  with_dtype(dtype_, [&](auto type) {
    for_each([&](int64_t i, int64_t at) {
      decltype(type) x;
      std::memcpy(&x, memory_.get() + at, sizeof x);
      out[i] = to_float(x);
    });
  });
  return out;
}

std::string Tensor::stray_write() const {
  std::vector<bool> owned(static_cast<size_t>(size_), false);
  for_each([&](int64_t, int64_t at) {
    for (int64_t i = 0; i < dtype_size(dtype_); ++i) owned[at + i] = true;
  });
  const int64_t first = (guard_ + place_.offset) * dtype_size(dtype_);
  for (int64_t at = 0; at < size_; ++at)
    if (!owned[at] && memory_[at] != fill_)
      return "byte " + std::to_string(at - first) + " from the first element was written";
  return "";
}

}  // namespace sagebwd::testing
