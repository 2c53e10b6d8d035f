// SPDX-License-Identifier: Apache-2.0
// Aligned text tables for the terminal.
#pragma once

#include <string>
#include <vector>

namespace sagebwd::cli {

enum class Side { left, right };

class Table {
 public:
  struct Column {
    std::string title;
    Side side = Side::right;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// One cell per column.
  void row(std::vector<std::string> cells) { rows_.push_back({std::move(cells), {}}); }
  /// A line of text across the table, with a blank line before it.
  void heading(std::string text) { rows_.push_back({{}, std::move(text)}); }

  std::string to_string() const;

 private:
  struct Row {
    std::vector<std::string> cells;
    std::string heading;
  };
  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

/// Columns a terminal needs for UTF-8 text (one per code point: we print no wide characters).
size_t display_width(const std::string& text);

/// `digits` significant digits, without exponent from 1e-4 up: 0.0184, 12.3, 1.2e-07.
std::string significant(double value, int digits = 3);
/// As few digits as tell the number apart: 1, 0.5, 10.
std::string shortest(double value);
/// A fixed number of decimals.
std::string fixed(double value, int decimals);

}  // namespace sagebwd::cli
