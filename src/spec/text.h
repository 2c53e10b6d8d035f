// SPDX-License-Identifier: Apache-2.0
// Words and numbers of texts that people write.
#pragma once

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace sagebwd::spec {

/// The parts between separators, empty ones too.
inline std::vector<std::string_view> split(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find_first_of(separators, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

/// The words of a line.
inline std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> found = split(text, " \t\r\n");
  std::erase_if(found, [](std::string_view word) { return word.empty(); });
  return found;
}

/// A whole number; an Error that begins with `where` for anything else.
template <typename T>
T number(std::string_view text, const std::string& where, T low, T high) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  SAGE_CHECK(
      error == std::errc{} && end == text.data() + text.size() && value >= low && value <= high,
      where << ": expected a whole number from " << low << " to " << high << ", got \"" << text
            << "\"");
  return value;
}

}  // namespace sagebwd::spec
