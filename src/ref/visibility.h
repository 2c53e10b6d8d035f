// SPDX-License-Identifier: Apache-2.0
// Which keys the queries of a head see. This is the one place of the oracles that knows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace sagebwd::ref {

/// Keys begin … end - 1.
struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

class Visibility {
 public:
  /// Every query sees every key.
  Visibility() = default;

  /// A band of the score matrix: query i sees the keys first … last - 1, {first, last} = band(i).
  template <typename F>
  requires std::is_invocable_r_v<std::pair<int64_t, int64_t>, F, int64_t> Visibility(F band)
      : band_(std::move(band)) {}

  /// What query i sees of the keys 0 … nk - 1: spans in increasing order, none of them empty.
  std::vector<Span> spans(int64_t i, int64_t nk) const {
    const Span seen = inside(i, 0, nk);
    return seen.empty() ? std::vector<Span>{} : std::vector<Span>{seen};
  }

  /// What query i sees of a tile's keys begin … end - 1. Within a tile that is one span.
  Span inside(int64_t i, int64_t begin, int64_t end) const {
    if (!band_) return {begin, end};
    const auto [first, last] = band_(i);
    return {std::clamp(first, begin, end), std::clamp(last, begin, end)};
  }

 private:
  std::function<std::pair<int64_t, int64_t>(int64_t)> band_;
};

}  // namespace sagebwd::ref
