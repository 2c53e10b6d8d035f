#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/*.svg from the records under results/. With --check it only compares."""

import importlib.util
import sys

from tables import ROOT, record, trained

NAMES = {"paper": "paper", "dither": "paper, dithered", "vectorwise": "vectorwise"}
WIDTH, HEIGHT, LEGEND = 480, 300, 34

CHART_STYLE = """
text { fill: var(--soft); font: 12px system-ui, "Segoe UI", Roboto, Arial, sans-serif; }
text.title { fill: var(--ink); font-size: 14px; font-weight: 650; }
.grid { stroke: var(--grid); } .axis { stroke: var(--faint); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.dot { fill: var(--c); }
.page { fill: var(--card); }
"""


def part(name):
    """Loads a file of the package's pages without the package, which would import torch."""
    path = ROOT / "python" / "sagebwd" / "pages" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"pages_{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


html, svg = part("html"), part("svg")


def chart(title, experiment, points, **options):
    """points(run, base): of a run, and of the full-precision run it is compared with."""
    colours = html.colours(list(NAMES))
    made = svg.Chart(title, "tokens", **options)
    arms = trained(experiment)
    for name in NAMES:
        if name in arms:
            per_step = arms[name][0]["config"]["tokens_per_step"]
            line = [(step * per_step, y) for step, y in points(*arms[name])]
            made.lines.append(svg.Line(NAMES[name], colours[name], line, dots=True))
    return made


def difference(title, experiment):
    """A chart of the difference of the eval loss to that of 16-bit attention."""

    def points(run, base):
        reference = dict(map(tuple, base["evals"]))
        return [(step, loss - reference[step]) for step, loss in run["evals"]]

    return chart(title, experiment, points, zero=True)


def largest_logit(title, experiment, layer):
    points = lambda run, _: [
        (a["step"], a["max_logit"]) for a in run["audits"] if a["layer"] == layer
    ]
    return chart(title, experiment, points, log_y=True)


def sheet(charts, names=NAMES):
    """Charts, two to a row, above one legend of ``names``."""
    rows = (len(charts) + 1) // 2
    width, height = 2 * WIDTH, rows * HEIGHT + LEGEND
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<style>{html.STYLE.split('/* Text */')[0]}{CHART_STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for i, each in enumerate(charts):
        text = svg.to_svg(each).replace("<figure>", "").replace("</figure>", "")
        place = f'<svg x="{i % 2 * WIDTH}" y="{i // 2 * HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        out.append(text.replace("<svg ", place, 1).rstrip())
    colours = html.colours(list(names))
    for i, (name, label) in enumerate(names.items()):
        x, y = 58 + i * 160, height - LEGEND / 2
        out.append(
            f'<g class="c-{colours[name]}"><circle class="dot" cx="{x}" cy="{y}" r="5"/>'
            f'<text x="{x + 12}" y="{y + 4}">{label}</text></g>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def tokens_per_step():
    above = "Eval loss above 16-bit attention"
    return sheet(
        [
            difference(f"{above}: 2.1M a step, QK-norm", "2.1M_qknorm_seed0"),
            difference(f"{above}: 2.1M a step, no QK-norm", "2.1M_plain_seed0"),
            difference(f"{above}: 260K a step, QK-norm", "260K_qknorm_seed0"),
            largest_logit(
                "Largest logit of the last layer: 260K a step, no QK-norm", "260K_plain_seed0", 3
            ),
        ]
    )


#: The arms of the first page.
FRONT = {"fpa": "16-bit attention", "vectorwise": "INT8 (vectorwise)"}


def whole_step():
    """Tokens per second of whole training steps over the context."""
    runs = record("train/throughput_325m.json")["runs"]
    title = "Tokens per second of a whole step, 325M model, H200"
    contexts = sorted({run["config"]["context"] for run in runs})
    made = svg.Chart(title, "context, tokens", log_x=True, zero=True)
    made.x_ticks = {context: str(context) for context in contexts}
    for name, label in FRONT.items():
        points = [
            (run["config"]["context"], run["summary"]["tokens_per_second"])
            for run in runs
            if run["summary"]["attention"] == name
        ]
        made.lines.append(svg.Line(label, html.colours(FRONT)[name], sorted(points), dots=True))
    return made


def loss_curve():
    r = record("train/tokens_per_step_45m_2.1M_decisive_seed0.json")
    made = svg.Chart("Training loss, 45M model, 2.1M tokens a step", "tokens")
    for run in r["runs"]:
        name = run["summary"]["attention"]
        if name in FRONT:
            per_step = run["config"]["tokens_per_step"]
            line = [(step * per_step, loss) for step, loss in run["curve"]]
            colour = html.colours(FRONT)[name]
            made.lines.append(svg.Line(FRONT[name], colour, svg.thinned(line)))
    return made


def first_page():
    return sheet([whole_step(), loss_curve()], FRONT)


def main():
    for name, make in {"tokens_per_step": tokens_per_step, "first_page": first_page}.items():
        path = ROOT / "docs" / "figures" / f"{name}.svg"
        made = make()
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made)
        elif not path.exists() or path.read_text() != made:
            sys.exit(f"{path.relative_to(ROOT)} differs from results/: run tools/figures.py")


if __name__ == "__main__":
    main()
