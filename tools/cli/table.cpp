// SPDX-License-Identifier: Apache-2.0
#include "table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace sagebwd::cli {
namespace {

std::string padded(const std::string& text, size_t width, Side side) {
  const std::string gap(width - std::min(width, display_width(text)), ' ');
  return side == Side::left ? text + gap : gap + text;
}

std::string print(const char* format, int digits, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), format, digits, value);
  return buffer;
}

}  // namespace

size_t display_width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u;  // not a continuation byte
  }));
}

std::string significant(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const double magnitude = std::abs(value);
  if (magnitude == 0) return "0";
  if (magnitude < 1e-4 || magnitude >= 1e7) return print("%.*e", digits - 1, value);
  const int before_point = static_cast<int>(std::floor(std::log10(magnitude))) + 1;
  return print("%.*f", std::max(0, digits - before_point), value);
}

std::string shortest(double value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, result.ptr);
}

std::string fixed(double value, int decimals) {
  if (!std::isfinite(value)) return significant(value);
  const std::string text = print("%.*f", decimals, value);
  const bool zero = text.find_first_not_of("-0.") == std::string::npos;
  return zero && text[0] == '-' ? text.substr(1) : text;
}

std::string Table::to_string() const {
  std::vector<size_t> width;
  for (size_t c = 0; c < columns_.size(); ++c) {
    width.push_back(display_width(columns_[c].title));
    for (const Row& r : rows_)
      if (c < r.cells.size()) width[c] = std::max(width[c], display_width(r.cells[c]));
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (size_t c = 0; c < columns_.size(); ++c)
      text +=
          (c ? "  " : "") + padded(c < cells.size() ? cells[c] : "", width[c], columns_[c].side);
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };

  std::vector<std::string> titles, rules;
  for (size_t c = 0; c < columns_.size(); ++c) {
    titles.push_back(columns_[c].title);
    std::string rule;
    for (size_t i = 0; i < width[c]; ++i) rule += "─";
    rules.push_back(rule);
  }
  std::string out = line(titles) + line(rules);
  bool first = true;
  for (const Row& r : rows_) {
    out += r.cells.empty() ? (first ? "" : "\n") + r.heading + "\n" : line(r.cells);
    first = false;
  }
  return out;
}

}  // namespace sagebwd::cli
