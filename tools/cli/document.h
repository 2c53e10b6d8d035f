// SPDX-License-Identifier: Apache-2.0
// What is on a page, as data. python/sagebwd/pages/document.py makes HTML of it, so nothing here
// escapes or draws. Texts may have `code` in backquotes; a class is one of the style sheet's.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace sagebwd::cli {

using nlohmann::json;

inline json paragraph(const std::string& text, const char* kind = "") {
  return {{"kind", "paragraph"}, {"text", text}, {"class", kind}};
}
inline json card(const std::string& title, json items) {
  return {{"kind", "card"}, {"title", title}, {"items", std::move(items)}};
}
/// Shown when the reader opens it.
inline json details(const std::string& title, json items) {
  return {{"kind", "details"}, {"title", title}, {"items", std::move(items)}};
}

struct Cell {
  Cell(std::string cell_text, std::string cell_class = "")
      : text(std::move(cell_text)), css(std::move(cell_class)) {}
  Cell(const char* cell_text) : text(cell_text) {}
  std::string text;
  std::string css;  // "words" is set flush left
};
inline json to_json(const std::vector<Cell>& cells) {
  json row = json::array();
  for (const Cell& c : cells) row.push_back({c.text, c.css});
  return row;
}

class TableItem {
 public:
  /// `css` is the class of the whole table.
  explicit TableItem(const std::vector<Cell>& titles, const char* css = "figures")
      : item_{{"kind", "table"},
              {"class", css},
              {"titles", to_json(titles)},
              {"rows", json::array()}} {}
  void row(const std::vector<Cell>& cells) { item_["rows"].push_back(to_json(cells)); }
  const json& item() const { return item_; }

 private:
  json item_;
};

}  // namespace sagebwd::cli
