# SPDX-License-Identifier: Apache-2.0
"""A card that shows what ``sagebwd.train.bias`` found: does the gradient error average out?"""

from ...pages import html
from ...pages.svg import Chart, Line, share, to_svg

PROJECTIONS = ("Wq", "Wk", "Wv", "Wo")


def verdict(record):
    """Whether each arm's error stays small and flat, in words."""
    parts = []
    for name in _arms(record):
        first, last = (record["rows"][i]["errors"][name] for i in (0, -1))
        worst = max(("Wq", "Wk", "Wv"), key=lambda p: last[p]["all"])
        a, b = first[worst]["all"], last[worst]["all"]
        trend = "grows" if b > 1.25 * a else "shrinks" if b < 0.8 * a else "stays"
        change = f"near {share(b)}" if trend == "stays" else f"from {share(a)} to {share(b)}"
        parts.append(f"that of `{name}` {trend} {change} ({worst})")
    few, many = (tokens_text(record["rows"][i]["tokens"]) for i in (0, -1))
    return f"From {few} to {many} tokens, the error of the summed gradient: {'; '.join(parts)}."


def bias_card(record, projections=PROJECTIONS):
    css = html.colours(_arms(record))
    charts = []
    for projection in projections:
        chart = Chart(
            f"{projection}, relative error of its gradient", "tokens", log_x=True, log_y=True
        )
        chart.x_ticks = {r["tokens"]: tokens_text(r["tokens"]) for r in record["rows"]}
        for name, colour in css.items():
            points = [(r["tokens"], r["errors"][name][projection]["all"]) for r in record["rows"]]
            chart.lines.append(Line(name, colour, points, dots=True))
        charts.append(to_svg(chart))
    return html.card(
        "Does the gradient error average out?",
        html.paragraph(verdict(record), css, "verdict"),
        html.paragraph(
            "Gradients of the attention weights, added up over more and more tokens, against the "
            "same with exact attention. Rounding noise shrinks as the batch grows. What stays, or "
            "grows, is bias: a large batch sees it in full." + _noise_words(record)
        ),
        html.legend(css),
        html.charts(charts),
    )


def _noise_words(record):
    """What the error should be compared with."""
    last = record["rows"][-1]
    noise = last["errors"].get("noise")
    if noise is None:
        return ""
    least = min(noise[p]["all"] for p in ("Wq", "Wk", "Wv"))
    return (
        f" For scale: the gradient itself, as {tokens_text(last['tokens'])} tokens estimate it, is "
        f"uncertain by at least {100 * least:.0f} %."
    )


def tokens_text(n):
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if n % size == 0:
            return f"{n // size}{unit}"
    return str(n)


def _arms(record):
    return [n for n in record["rows"][0]["errors"] if n != "noise"]
