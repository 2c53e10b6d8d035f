// SPDX-License-Identifier: Apache-2.0
// Pieces of a self-contained web page: escaping, tables, and the frame with its style sheet.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sagebwd::cli {

/// Text that is safe inside elements and double-quoted attributes.
std::string escape(const std::string& text);
/// The same, with `code` in backquotes as <code>; the recipes' names in their colours.
std::string prose(const std::string& text);

struct HtmlCell {
  HtmlCell(std::string cell_text, std::string cell_css = "")
      : text(std::move(cell_text)), css(std::move(cell_css)) {}
  HtmlCell(const char* cell_text) : text(cell_text) {}
  std::string text;
  std::string css;  // class of the cell; "words" is set flush left
};

class HtmlTable {
 public:
  /// `css` is the class of the whole table.
  explicit HtmlTable(std::vector<HtmlCell> titles, std::string css = "figures")
      : titles_(std::move(titles)), css_(std::move(css)) {}
  void row(std::vector<HtmlCell> cells) { rows_.push_back(std::move(cells)); }
  std::string to_html() const;

 private:
  std::vector<HtmlCell> titles_;
  std::string css_;
  std::vector<std::vector<HtmlCell>> rows_;
};

/// A page that needs nothing but itself: style inline, light and dark.
std::string page_frame(const std::string& title, const std::string& body);

}  // namespace sagebwd::cli
