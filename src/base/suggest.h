// SPDX-License-Identifier: Apache-2.0
// What a mistyped word was probably meant to be.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

/// How many letters to add, drop, change or swap with a neighbour to turn one word into the other.
/// Upper and lower case count as equal.
inline size_t edit_distance(std::string_view a, std::string_view b) {
  const auto same = [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) ==
           std::tolower(static_cast<unsigned char>(y));
  };
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      const size_t change = same(a[i - 1], b[j - 1]) ? 0 : 1;
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + change});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  return cost[a.size()][b.size()];
}

/// The known word nearest to `word`, if at most a third of its letters differ and no other word is
/// as near. Being the beginning of a known word counts as one difference. Empty if there is none.
inline std::string nearest_word(std::string_view word, const std::vector<std::string>& known) {
  constexpr size_t kLongest = 40;  // a longer word is no slip of the keyboard
  if (word.empty() || word.size() > kLongest) return "";
  std::string best;
  size_t least = kLongest;
  bool tied = false;
  for (const std::string& k : known) {
    const bool begins = word.size() > 1 && k.starts_with(word);
    const size_t distance = begins ? 1 : edit_distance(word, k);
    if (distance > std::max<size_t>(1, std::max(word.size(), k.size()) / 3)) continue;
    if (distance == least && k != best) tied = true;
    if (distance < least) best = k, least = distance, tied = false;
  }
  return tied ? "" : best;
}

/// The end of an error message: "; did you mean \"trace\"?", or nothing.
inline std::string did_you_mean(std::string_view word, const std::vector<std::string>& known) {
  const std::string near = nearest_word(word, known);
  return near.empty() ? "" : "; did you mean \"" + near + "\"?";
}

}  // namespace sagebwd
