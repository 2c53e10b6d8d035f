// SPDX-License-Identifier: Apache-2.0
// Pieces of a self-contained web page: escaping, tables, and the frame with its style sheet.
#pragma once

#include <string>
#include <vector>

namespace sagebwd::cli {

/// Text that is safe inside elements and double-quoted attributes. `code` in backquotes becomes
/// <code>.
std::string escape(const std::string& text);
std::string prose(const std::string& text);

struct HtmlCell {
  std::string text;
  std::string css = "";  // class of the cell
};

class HtmlTable {
 public:
  explicit HtmlTable(std::vector<std::string> titles) : titles_(std::move(titles)) {}
  void row(std::vector<HtmlCell> cells) { rows_.push_back(std::move(cells)); }
  /// The first column is a row heading; the others are figures.
  std::string to_html() const;

 private:
  std::vector<std::string> titles_;
  std::vector<std::vector<HtmlCell>> rows_;
};

/// A page that needs nothing but itself: style inline, light and dark.
std::string page_frame(const std::string& title, const std::string& body);

}  // namespace sagebwd::cli
