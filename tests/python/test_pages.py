# SPDX-License-Identifier: Apache-2.0
"""Pages: markup, charts, and the page of a record."""

import json
import math
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from sagebwd.pages import document, html, svg
from sagebwd.pages.__main__ import main


def picture(text):
    return ElementTree.fromstring(text.strip())


def classes(element):
    return [e.get("class") for e in element.iter() if e.get("class")]


def test_text_is_escaped_and_code_is_marked():
    assert html.prose("a<b & `x<y`") == "a&lt;b &amp; <code>x&lt;y</code>"
    css = {"paper": "paper"}
    assert html.prose("`paper`", css) == '<code class="arm c-paper">paper</code>'
    table = html.table(["<i>"], [[("<b>", "good")]], kind="figures")
    assert '<table class="figures">' in table and '<td class="good">&lt;b&gt;</td>' in table
    assert "class" not in html.table(["a"], [[("b", " ")]]).replace('class="scroll"', "")


def test_a_line_chart_draws_every_finite_point():
    lines = [
        svg.Line("ours", "vectorwise", [(1, 0.02), (3, 0.06), (10, 0.5)], dots=True),
        svg.Line("theirs", "published", [(1, 0.02), (3, math.nan), (10, 0.0)], rings=True),
    ]
    drawn = picture(svg.to_svg(svg.Chart("dQ", "σ", lines, log_y=True, y_range=(0.01, 1))))
    found = classes(drawn)
    assert found.count("dot") == 3 and found.count("ring") == 1 and found.count("line") == 1
    assert "nan" not in ElementTree.tostring(drawn, "unicode")


def test_bars_grow_with_their_values():
    bars = [("a", "paper", [0.1, 0.2]), ("b", "vectorwise", [0.0, math.nan])]
    drawn = picture(svg.bars_to_svg(svg.Bars("sink", ["O", "dQ"], bars, most=0.4, small=True)))
    widths = [float(e.get("width")) for e in drawn.iter() if e.get("class") == "bar"]
    tenth, none, fifth, whole = widths  # what is not finite fills its row
    assert none == 1.0 and fifth == pytest.approx(2 * tenth) and whole == pytest.approx(2 * fifth)
    assert "chart small" in classes(drawn)


ITEMS = [
    {"kind": "tiles", "tiles": [{"name": "n", "value": "1%", "note": "`paper` 2%"}]},
    {
        "kind": "card",
        "title": "A <card>",
        "items": [
            {"kind": "paragraph", "text": "`vectorwise` wins", "class": "verdict"},
            {"kind": "legend", "entries": [["paper", "paper"]]},
            {
                "kind": "charts",
                "class": "",
                "charts": [
                    {
                        "title": "dQ, relative L2 error",
                        "x_label": "σ",
                        "x_ticks": [1, 3],
                        "y_range": [0.01, 0.2],
                        "lines": [
                            {
                                "label": "paper",
                                "colour": "paper",
                                "joined": True,
                                "points": [[1, 0.02], [3, None]],
                            }
                        ],
                    }
                ],
            },
            {
                "kind": "charts",
                "class": "thirds",
                "charts": [
                    {
                        "title": "sink",
                        "clusters": ["O"],
                        "most": 1,
                        "bars": [["paper", "paper", [None]]],
                    }
                ],
            },
            {
                "kind": "details",
                "title": "Figures",
                "items": [
                    {
                        "kind": "table",
                        "class": "figures",
                        "titles": [["inputs", ""]],
                        "rows": [[["sink", "section name"]]],
                    }
                ],
            },
            {"kind": "facts", "facts": [["command", "`sagebwd report`"]]},
        ],
    },
]
PAGE = {"title": "T<1>", "lead": "words", "items": ITEMS}


def test_a_document_has_every_kind_of_item():
    text = document.render(PAGE)
    assert "<title>T&lt;1&gt;</title>" in text and html.STYLE in text
    body = ElementTree.fromstring(text[text.index("<body>") : text.index("</html>")])
    found = classes(body)
    for name in ("tiles", "verdict", "dot", "bar", "charts thirds", "figures", "section name"):
        assert name in found, name
    assert {e.tag for e in body.iter()} >= {"details", "dl", "svg", "table"}
    assert "A <card>" in "".join(body.itertext()) and "sagebwd report" in "".join(body.itertext())
    assert not [e for e in body.iter() if e.get("src") or e.get("href")]


def test_the_program_takes_a_file_or_the_standard_input(tmp_path, capsys):
    record, page = tmp_path / "r.json", tmp_path / "r.html"
    record.write_text(json.dumps({"page": PAGE}))
    main([str(record), str(page)])
    assert page.read_text() == document.render(PAGE)
    other = tmp_path / "other.html"
    command = [sys.executable, "-m", "sagebwd.pages", "-", str(other)]
    subprocess.run(command, input=record.read_bytes(), check=True)
    assert other.read_bytes() == page.read_bytes()
    record.write_text("{}")
    with pytest.raises(SystemExit) as refused:
        main([str(record), str(page)])
    assert refused.value.code == 2 and 'has no "page"' in capsys.readouterr().err
