// SPDX-License-Identifier: Apache-2.0
#include "html.h"

#include "style.h"

namespace sagebwd::cli {

std::string escape(const std::string& text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string prose(const std::string& text) {
  const std::string safe = escape(text);
  std::string out;
  for (size_t at = 0; at < safe.size();) {
    const size_t open = safe.find('`', at);
    const size_t close = open == std::string::npos ? open : safe.find('`', open + 1);
    if (close == std::string::npos) return out + safe.substr(at);
    const std::string code = safe.substr(open + 1, close - open - 1);
    const bool recipe = code == "paper" || code == "vectorwise";
    out += safe.substr(at, open - at);
    out += recipe ? "<code class=\"arm c-" + code + "\">" : "<code>";
    out += code + "</code>";
    at = close + 1;
  }
  return out;
}

std::string HtmlTable::to_html() const {
  const auto row = [](const std::vector<HtmlCell>& cells, const std::string& element) {
    std::string out = "<tr>";
    for (const HtmlCell& c : cells) {
      out += "<" + element;
      if (!c.css.empty()) out += " class=\"" + c.css + "\"";
      out += ">" + prose(c.text) + "</" + element + ">";
    }
    return out + "</tr>\n";
  };
  std::string out = "<div class=\"scroll\"><table class=\"" + css_ + "\"><thead>" +
                    row(titles_, "th") + "</thead><tbody>\n";
  for (const auto& cells : rows_) out += row(cells, "td");
  return out + "</tbody></table></div>\n";
}

std::string page_frame(const std::string& title, const std::string& body) {
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
         escape(title) + "</title>\n<style>" + kStyle + "</style>\n</head>\n<body>\n<main>\n" +
         body + "</main>\n</body>\n</html>\n";
}

}  // namespace sagebwd::cli
