# SPDX-License-Identifier: Apache-2.0
"""Pieces of a page: style, text, tables, cards."""

from html import escape
from pathlib import Path

#: One style sheet for all pages.
STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")

NAMED = ("paper", "vectorwise", "fpa")
OTHERS = 5


def colours(names):
    """A colour for every arm: those that every report knows, then five more in turn."""
    rest = [n for n in names if n not in NAMED]
    return {n: n if n in NAMED else f"other{rest.index(n) % OTHERS + 1}" for n in names}


def prose(text, css=None):
    """Text with `code` in it; names of arms get their colour from ``css``."""
    parts = escape(text).replace("± ", "±\u00a0").split("`")
    for i in range(1, len(parts), 2):
        name = (css or {}).get(parts[i])
        kind = f' class="arm c-{name}"' if name else ""
        parts[i] = f"<code{kind}>{parts[i]}</code>"
    return "".join(parts)


def paragraph(text, css=None, kind=""):
    if not text:
        return ""
    return f'<p class="{kind}">{prose(text, css)}</p>\n' if kind else f"<p>{prose(text, css)}</p>\n"


def card(title, *body):
    return f'<section class="card">\n<h2>{escape(title)}</h2>\n{"".join(body)}</section>\n'


def details(title, body):
    return f"<details><summary>{escape(title)}</summary>\n{body}</details>\n"


def tile(name, value, note, css, colour=""):
    kind = f"tile c-{colour}" if colour else "tile"
    return (
        f'<div class="{kind}"><div class="name">{prose(name, css)}</div>'
        f'<div class="value">{escape(value)}</div>'
        f'<div class="note">{prose(note, css)}</div></div>\n'
    )


def table(titles, rows, css=None, kind=""):
    """Cells are text, or (text, class). ``kind``: the class of the whole table."""

    def row(cells, element):
        out = ""
        for cell in cells:
            text, of_cell = cell if isinstance(cell, tuple) else (cell, "")
            out += f"<{element}{_class(of_cell)}>{prose(text, css)}</{element}>"
        return f"<tr>{out}</tr>\n"

    head = row(titles, "th")
    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="scroll"><table{_class(kind)}><thead>{head}</thead><tbody>\n'
        f"{body}</tbody></table></div>\n"
    )


def _class(name):
    return f' class="{escape(name)}"' if name.strip() else ""


def charts(pictures, kind=""):
    return f'<div class="{f"charts {kind}".strip()}">\n{"".join(pictures)}</div>\n'


def link(address, text):
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def legend(css, noise=""):
    """``noise``: what the shaded band is, where charts have one."""
    spans = "".join(f'<span class="c-{c}">{escape(n)}</span>' for n, c in css.items())
    spans += f'<span class="noise">{escape(noise)}</span>' if noise else ""
    return f'<div class="legend">{spans}</div>\n'


def page(title, body):
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
