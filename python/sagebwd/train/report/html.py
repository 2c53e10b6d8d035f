# SPDX-License-Identifier: Apache-2.0
"""Pieces of a page, in the look of the command-line tool's reports: style, text, tables, cards."""

from html import escape

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #f7f7f5; --card: #ffffff; --ink: #1c1e21; --soft: #5d646d; --faint: #8a919b;
  --line: #e2e3e0; --grid: #ebece9; --code: #eff0ed;
  --paper: #c8591b; --vectorwise: #1d6fc2; --fpa: #6b7280;
  --other1: #5b8a3a; --other2: #8b4bb3; --other3: #b08900; --other4: #0f8b8d; --other5: #b8336a;
  --good: #1a7f42; --bad: #b42318;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14161a; --card: #1c1f24; --ink: #e8e9eb; --soft: #a9b0ba; --faint: #7d8590;
    --line: #2d3138; --grid: #2a2e35; --code: #262a31;
    --paper: #f08a4b; --vectorwise: #5aa9f2; --fpa: #9aa3af;
    --other1: #8fbf68; --other2: #c492e6; --other3: #e0c04c; --other4: #4cc4c6; --other5: #ef7fae;
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
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px;
  border-top: 3px solid var(--c);
}
.tile .name { font-size: 13px; color: var(--soft); }
.tile .value { font-size: 28px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.3; }
.tile .note { font-size: 13px; color: var(--faint); }
code {
  font: 0.9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--code);
  border-radius: 4px; padding: 1px 5px; overflow-wrap: anywhere;
}
code.arm { color: var(--c); background: none; padding: 0; font-weight: 600; }
pre {
  font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 6px 0 14px;
  background: var(--code); border-radius: 8px; padding: 12px 14px; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 260px; overflow-y: auto;
}
.scroll { overflow-x: auto; }
table {
  border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums;
}
th, td {
  text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap;
}
thead th, thead th:first-child {
  color: var(--soft); font-weight: 600; border-bottom-color: var(--faint);
}
th:first-child, td:first-child { text-align: left; padding-left: 0; font-weight: 500; }
tr:last-child td { border-bottom: 0; }
th.words, td.words { text-align: left; white-space: normal; }
td.good { color: var(--good); font-weight: 600; }
td.bad { color: var(--bad); font-weight: 600; }
.verdict { font-size: 20px; font-weight: 600; letter-spacing: -0.01em; }
.charts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 14px 24px;
  margin: 14px 0 8px;
}
@media (max-width: 560px) {
  .charts { grid-template-columns: 1fr; }
  main { padding: 24px 14px; }
}
figure { margin: 0; }
svg.chart { width: 100%; height: auto; display: block; }
svg.chart text {
  fill: var(--soft); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif;
}
svg.chart text.title { fill: var(--ink); font-size: 14px; font-weight: 650; }
svg.chart .grid { stroke: var(--grid); stroke-width: 1; }
svg.chart .axis { stroke: var(--faint); stroke-width: 1; }
svg.chart .line {
  fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round;
}
svg.chart .thin { stroke-width: 1; opacity: 0.3; }
svg.chart .dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
.legend {
  display: flex; flex-wrap: wrap; gap: 6px 20px; font-size: 14px; color: var(--soft);
  margin-top: 6px;
}
.legend span::before {
  content: ""; display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  background: var(--c); margin-right: 7px; vertical-align: -1px;
}
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); font-size: 14px; }
details[open] summary { margin-bottom: 8px; }
dl {
  display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; font-size: 14px;
}
dt { color: var(--soft); } dd { margin: 0; }
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""

NAMED = ("paper", "vectorwise", "fpa")
OTHERS = 5


def colours(names):
    """A colour for every arm: the three that every report knows, then five more in turn."""
    rest = [n for n in names if n not in NAMED]
    return {n: n if n in NAMED else f"other{rest.index(n) % OTHERS + 1}" for n in names}


def colour_rules():
    names = [*NAMED, *(f"other{i + 1}" for i in range(OTHERS))]
    return "".join(f".c-{n} {{ --c: var(--{n}); }}\n" for n in names)


def prose(text, css=None):
    """Text with `code` in it; names of arms get their colour from ``css``."""
    parts = escape(text).split("`")
    for i in range(1, len(parts), 2):
        name = (css or {}).get(parts[i])
        kind = f' class="arm c-{name}"' if name else ""
        parts[i] = f"<code{kind}>{parts[i]}</code>"
    return "".join(parts)


def paragraph(text, css=None, kind=""):
    return f'<p class="{kind}">{prose(text, css)}</p>\n' if kind else f"<p>{prose(text, css)}</p>\n"


def card(title, *body):
    return f'<section class="card">\n<h2>{escape(title)}</h2>\n{"".join(body)}</section>\n'


def details(title, body):
    return f"<details><summary>{escape(title)}</summary>\n{body}</details>\n"


def tile(name, value, note, css, colour):
    return (
        f'<div class="tile c-{colour}"><div class="name">{prose(name, css)}</div>'
        f'<div class="value">{escape(value)}</div>'
        f'<div class="note">{prose(note, css)}</div></div>\n'
    )


def table(titles, rows, css=None):
    """Cells are text, or (text, class)."""

    def row(cells, element):
        out = ""
        for cell in cells:
            text, kind = cell if isinstance(cell, tuple) else (cell, "")
            out += f"<{element}{f' class={kind!r}' if kind else ''}>{prose(text, css)}</{element}>"
        return f"<tr>{out}</tr>\n"

    head = row(titles, "th")
    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="scroll"><table><thead>{head}</thead><tbody>\n{body}</tbody></table></div>\n'
    )


def legend(css):
    spans = "".join(f'<span class="c-{c}">{escape(n)}</span>' for n, c in css.items())
    return f'<div class="legend">{spans}</div>\n'


def page(title, body):
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{colour_rules()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
