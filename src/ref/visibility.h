// SPDX-License-Identifier: Apache-2.0
// Which keys the queries of a head see. This is the one place of the oracles that knows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace sagebwd::ref {

/// Keys begin … end - 1.
struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

/// Block lists of one head: row r has the key blocks that queries r·block_q and following list, in
/// the order of the list. Blocks have block_k keys.
struct BlockRows {
  int64_t block_q, block_k;
  std::vector<std::vector<int64_t>> rows;
};

class Visibility {
 public:
  /// Every query sees every key.
  Visibility() = default;

  /// A band of the score matrix: query i sees the keys first … last - 1, {first, last} = band(i).
  template <typename F>
  requires std::is_invocable_r_v<std::pair<int64_t, int64_t>, F, int64_t> Visibility(F band)
      : band_(std::move(band)) {}

  /// Of what the band leaves, query i sees the listed blocks only.
  void restrict_to(BlockRows lists) { lists_ = std::move(lists); }
  const std::optional<BlockRows>& lists() const { return lists_; }

  /// What query i sees of the keys 0 … nk - 1: spans in increasing order, none of them empty.
  std::vector<Span> spans(int64_t i, int64_t nk) const {
    std::vector<Span> seen;
    const auto add = [&](int64_t begin, int64_t end) {
      const Span span = in_band(i, begin, std::min(end, nk));
      if (!span.empty()) seen.push_back(span);
    };
    if (!lists_) {
      add(0, nk);
      return seen;
    }
    std::vector<int64_t> blocks = row_of(i);
    std::sort(blocks.begin(), blocks.end());
    for (int64_t block : blocks) add(block * lists_->block_k, (block + 1) * lists_->block_k);
    return seen;
  }

  /// What query i sees of a tile's keys begin … end - 1. Within a tile that is one span, because a
  /// tile lies within one block of a list.
  Span inside(int64_t i, int64_t begin, int64_t end) const {
    if (lists_) {
      const std::vector<int64_t>& blocks = row_of(i);
      const int64_t block = begin / lists_->block_k;
      if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) return {begin, begin};
    }
    return in_band(i, begin, end);
  }

 private:
  Span in_band(int64_t i, int64_t begin, int64_t end) const {
    if (!band_) return {begin, end};
    const auto [first, last] = band_(i);
    return {std::clamp(first, begin, end), std::clamp(last, begin, end)};
  }
  const std::vector<int64_t>& row_of(int64_t i) const {
    return lists_->rows[static_cast<size_t>(i / lists_->block_q)];
  }

  std::function<std::pair<int64_t, int64_t>(int64_t)> band_;
  std::optional<BlockRows> lists_;
};

}  // namespace sagebwd::ref
