// SPDX-License-Identifier: Apache-2.0
#include "html.h"

namespace sagebwd::cli {
namespace {

constexpr const char* kStyle = R"css(
:root {
  color-scheme: light dark;
  --bg: #f7f7f5; --card: #ffffff; --ink: #1c1e21; --soft: #5d646d; --faint: #8a919b;
  --line: #e2e3e0; --grid: #ebece9; --code: #eff0ed;
  --paper: #c8591b; --vectorwise: #1d6fc2; --published: #6b7280; --other: #5b8a3a;
  --good: #1a7f42; --bad: #b42318;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14161a; --card: #1c1f24; --ink: #e8e9eb; --soft: #a9b0ba; --faint: #7d8590;
    --line: #2d3138; --grid: #2a2e35; --code: #262a31;
    --paper: #f08a4b; --vectorwise: #5aa9f2; --published: #9aa3af; --other: #8fbf68;
    --good: #52c07c; --bad: #f47067;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
header { margin-bottom: 28px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 8px; }
h2 { font-size: 20px; letter-spacing: -0.01em; margin: 0 0 6px; }
p { margin: 0 0 12px; max-width: 78ch; }
.lead { font-size: 17px; color: var(--soft); }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 24px 26px; margin: 0 0 20px;
}
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 14px;
  margin: 0 0 20px;
}
.tile {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px 18px;
}
.tile .name { font-size: 13px; color: var(--soft); }
.tile .value { font-size: 28px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.3; }
.tile .note { font-size: 13px; color: var(--faint); }
code {
  font: 0.9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--code);
  border-radius: 4px; padding: 1px 5px; overflow-wrap: anywhere;
}
code.recipe { color: var(--c); background: none; padding: 0; font-weight: 600; }
.scroll { overflow-x: auto; }
table {
  border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums;
}
th, td {
  text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line);
  white-space: nowrap;
}
thead th, thead th:first-child {
  color: var(--soft); font-weight: 600; border-bottom-color: var(--faint);
}
th:first-child, td:first-child { text-align: left; padding-left: 0; font-weight: 500; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
td.group { border-top: 1px solid var(--faint); }
table.words th, table.words td { text-align: left; }
table.words td:first-child { width: 130px; }
th.name, td.name { text-align: left; }
td.wrap { white-space: normal; max-width: 240px; }
th.words, td.words { text-align: left; white-space: normal; }
td.good { color: var(--good); font-weight: 600; }
td.bad { color: var(--bad); font-weight: 600; }
td.best { font-weight: 650; }
.verdict { font-size: 20px; font-weight: 600; letter-spacing: -0.01em; }
.charts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 10px 24px;
  margin: 14px 0 8px;
}
.charts.thirds { grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }
@media (max-width: 560px) {
  .charts, .charts.thirds { grid-template-columns: 1fr; }
  main { padding: 24px 14px; }
}
figure { margin: 0; }
svg.chart { width: 100%; height: auto; display: block; }
svg.chart text {
  fill: var(--soft); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif;
}
svg.chart text.title { fill: var(--ink); font-size: 14px; font-weight: 650; }
svg.chart text.value { fill: var(--ink); font-variant-numeric: tabular-nums; }
svg.chart .grid { stroke: var(--grid); stroke-width: 1; }
svg.chart .axis { stroke: var(--faint); stroke-width: 1; }
.c-paper { --c: var(--paper); } .c-vectorwise { --c: var(--vectorwise); }
.c-published { --c: var(--published); } .c-other { --c: var(--other); }
svg.chart .line {
  fill: none; stroke: var(--c); stroke-width: 2.25; stroke-linejoin: round;
  stroke-linecap: round;
}
svg.chart .dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
svg.chart .ring { fill: var(--card); stroke: var(--c); stroke-width: 1.75; }
svg.chart .bar { fill: var(--c); }
.legend {
  display: flex; flex-wrap: wrap; gap: 6px 20px; font-size: 14px; color: var(--soft);
  margin-top: 6px;
}
.legend span::before {
  content: ""; display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  background: var(--c); margin-right: 7px; vertical-align: -1px;
}
.legend span.c-published::before {
  background: none; border: 2px solid var(--c); border-radius: 50%;
}
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); font-size: 14px; }
details[open] summary { margin-bottom: 8px; }
dl {
  display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0;
  font-size: 14px;
}
dt { color: var(--soft); } dd { margin: 0; }
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
)css";

}  // namespace

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
    out += recipe ? "<code class=\"recipe c-" + code + "\">" : "<code>";
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
