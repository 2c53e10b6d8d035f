# SPDX-License-Identifier: Apache-2.0
"""The findings as one HTML page that needs nothing beside itself."""

import math

from ...pages import html
from ...pages.svg import Chart, Line, to_svg
from ..diagnosis import USABLE
from .layers import TENSORS

_COLOURS = dict(zip(TENSORS, ("vectorwise", "paper", "other1", "other2")))


def page(findings):
    """The text of the page of a :class:`.__main__.Findings`."""
    first, *rest = findings.advice
    body = (
        f"<header>\n<h1>sagebwd doctor</h1>\n{html.paragraph(findings.title, kind='lead')}"
        "</header>\n"
        + html.card("Advice", html.paragraph(first, kind="verdict"), *map(html.paragraph, rest))
        + html.card("Layer by layer", *_layers(findings.examined))
        + html.card("The whole model", *_whole(findings.whole))
        + html.card("Speed on this machine", *_speed(findings))
    )
    return html.page("sagebwd doctor", body)


def _percent(value):
    if not math.isfinite(value):
        return "–"
    return (f"{100 * value:.2f}", "" if value <= USABLE else "bad")


def _layers(examined):
    chart = Chart("Relative L2 error", "attention call", log_y=True, whole_x=True)
    for tensor in TENSORS:
        points = [(i, e.report.errors[tensor]) for i, e in enumerate(examined) if e.report.errors]
        if points:
            chart.lines.append(Line(tensor, _COLOURS[tensor], points, dots=True))
    logits = [(i, e.report.max_logit) for i, e in enumerate(examined) if e.report.errors]
    tops = Chart("Largest logit", "attention call", zero=True, whole_x=True)
    tops.lines.append(Line("largest logit", "fpa", logits, dots=True))
    rows = [
        [
            (e.module or "the model", "name"),
            "{} ({}) × {}".format(*e.shape[:2], e.shape[4]),
            "{} × {}".format(*e.shape[2:4]),
            *(_percent(e.report.errors.get(t, math.nan)) for t in TENSORS),
            f"{e.report.max_logit:.1f}" if e.report.errors else "–",
            _percent(e.leak),
            (e.report.verdict, "words"),
        ]
        for e in examined
    ]
    titles = [
        ("call", "name"), "heads (of keys) × dim", "queries × keys",
        *(f"{t}, %" for t in TENSORS), "largest logit", "leak, %", ("verdict", "words"),
    ]  # fmt: skip
    words = (
        "What INT8 attention makes of the very q, k, v and dO that each call of the model has, "
        "against exact attention in float64. `leak`: how much the results of the first half of a "
        "causal call change when the second half is not there."
    )
    pictures = [to_svg(chart), to_svg(tops)] if chart.lines else []
    return (
        html.paragraph(words),
        html.legend({t: _COLOURS[t] for t in TENSORS}) + html.charts(pictures) if pictures else "",
        html.table(titles, rows),
    )


def _whole(whole):
    name, worst = whole.worst
    words = (
        f"One step with the hook beside one without it: {whole.calls} calls in INT8, loss "
        f"{whole.loss_int8:.5f} instead of {whole.loss:.5f}. The gradients of all weights are off "
        f"by {whole.error:.2%}, and those of no matrix by more than {worst:.2%} (`{name}`)."
    )
    rows = [[(reason, "words"), str(count)] for reason, count in whole.elsewhere.items()]
    table = html.table([("calls that keep PyTorch's attention", "words"), "calls"], rows)
    return html.paragraph(words), table if rows else ""


def _speed(findings):
    if not findings.timed:
        return (html.paragraph(f"Not timed: {findings.not_timed}."),)
    words = (
        "Attention of the shape that most calls have, forward and backward with quantisation, "
        f"batch 1, on {findings.machine}."
    )
    titles = ["tokens", "INT8, ms", "PyTorch, ms", "ratio", ("served by", "words")]
    rows = [
        [
            str(t.tokens), f"{t.int8:.2f}", f"{t.torch:.2f}",
            (f"{t.ratio:.2f}", "good" if t.ratio > 1 else ""),
            (", ".join(dict.fromkeys(t.kernels)), "words"),
        ]
        for t in findings.timed
    ]  # fmt: skip
    return html.paragraph(words), html.table(titles, rows)
