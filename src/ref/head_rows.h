// SPDX-License-Identifier: Apache-2.0
// One head of a strided tensor as rows of numbers, and back.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dispatch_dtype.h"
#include "sagebwd/types.h"
#include "spec/batch.h"

namespace sagebwd::ref {

/// One head of one sequence in a strided tensor.
struct HeadRows {
  const TensorView& view;
  int64_t batch, head, begin, count;

  int64_t offset(int64_t i) const {
    return batch * view.stride[0] + head * view.stride[1] + (begin + i) * view.stride[2];
  }

  std::vector<float> read() const {
    const int64_t d = view.shape[3];
    std::vector<float> out(static_cast<size_t>(count * d));
    with_dtype(view.dtype, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(view.data);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < d; ++c) out[i * d + c] = to_float(from[offset(i) + c]);
    });
    return out;
  }

  std::vector<double> read_wide() const {
    const std::vector<float> rows = read();
    return {rows.begin(), rows.end()};
  }

  template <typename T>
  void write(const std::vector<T>& rows) const {
    const int64_t d = view.shape[3];
    with_dtype(view.dtype, [&](auto type) {
      auto* to = static_cast<decltype(type)*>(view.data);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < d; ++c)
          to[offset(i) + c] = from_float<decltype(type)>(static_cast<float>(rows[i * d + c]));
    });
  }
};

inline HeadRows queries(const TensorView& view, const spec::Sequence& s, int64_t head) {
  return {view, s.batch, head, s.q_begin, s.nq};
}
inline HeadRows keys(const TensorView& view, const spec::Sequence& s, int64_t head) {
  return {view, s.batch, head, s.k_begin, s.nk};
}

inline float& stat(const StatsView& view, const spec::Sequence& s, int64_t head, int64_t i) {
  return view
      .data[s.batch * view.stride[0] + head * view.stride[1] + (s.q_begin + i) * view.stride[2]];
}

inline std::vector<float> read_stats(const StatsView& view, const spec::Sequence& s, int64_t head) {
  std::vector<float> out;
  for (int64_t i = 0; i < s.nq; ++i) out.push_back(stat(view, s, head, i));
  return out;
}

}  // namespace sagebwd::ref
