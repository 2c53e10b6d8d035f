# SPDX-License-Identifier: Apache-2.0
"""A page from what the command-line program says is on it (the "page" of its records;
tools/cli/document.h has its kinds of items)."""

import math
from html import escape

from . import html, svg

#: Arms whose names get their colour.
_CSS = {name: name for name in ("paper", "vectorwise")}


def render(document):
    """The text of a page."""
    lead = html.paragraph(document["lead"], _CSS, "lead")
    header = f"<header>\n<h1>{escape(document['title'])}</h1>\n{lead}</header>\n"
    return html.page(document["title"], header + _items(document["items"]))


def _items(items):
    return "".join(_KINDS[item["kind"]](item) for item in items)


def _tiles(item):
    tiles = "".join(html.tile(t["name"], t["value"], t["note"], _CSS) for t in item["tiles"])
    return f'<div class="tiles">\n{tiles}</div>\n' if tiles else ""


def _table(item):
    rows = ([tuple(cell) for cell in row] for row in item["rows"])
    return html.table([tuple(cell) for cell in item["titles"]], rows, _CSS, item["class"])


def _charts(item):
    pictures = [_bars(c) if "bars" in c else _lines(c) for c in item["charts"]]
    return html.charts(pictures, item["class"])


def _lines(chart):
    lines = [
        svg.Line(
            line["label"],
            line["colour"],
            [(x, _number(y)) for x, y in line["points"]],
            dots=line["joined"],
            rings=not line["joined"],
        )
        for line in chart["lines"]
    ]
    return svg.to_svg(
        svg.Chart(
            chart["title"],
            chart["x_label"],
            lines,
            log_y=True,
            x_ticks={x: svg.number(x) for x in chart["x_ticks"]},
            y_range=(0.95 * chart["y_range"][0], 1.05 * chart["y_range"][1]),
        )
    )


def _bars(chart):
    bars = [
        (label, colour, [_number(v) for v in values]) for label, colour, values in chart["bars"]
    ]
    return svg.bars_to_svg(
        svg.Bars(chart["title"], chart["clusters"], bars, most=chart["most"], small=True)
    )


def _number(value):
    """JSON has no number for what is not finite."""
    return math.nan if value is None else value


def _facts(item):
    facts = (f"<dt>{escape(n)}</dt><dd>{html.prose(v)}</dd>\n" for n, v in item["facts"])
    return f"<dl>\n{''.join(facts)}</dl>\n"


_KINDS = {
    "paragraph": lambda item: html.paragraph(item["text"], _CSS, item["class"]),
    "card": lambda item: html.card(item["title"], _items(item["items"])),
    "details": lambda item: html.details(item["title"], _items(item["items"])),
    "legend": lambda item: html.legend({name: colour for name, colour in item["entries"]}),
    "tiles": _tiles,
    "table": _table,
    "charts": _charts,
    "facts": _facts,
}
