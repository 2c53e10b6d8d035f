# SPDX-License-Identifier: Apache-2.0
"""The records as one HTML page that needs nothing beside itself."""

from html import escape

from ..pages import html
from ..pages.svg import Bars, Chart, Line, bars_to_svg, to_svg
from ..tools.diagnosis import USABLE
from ..train.files import write_text
from .arms import SIXTEEN
from .finetune import summary, verdict
from .gradients import worst_of
from .layers import TENSORS, totals, verdicts


def write_page(records, path):
    """``records``: {part: record}, at least one."""
    cards = {"layers": _layers, "gradients": _gradients, "finetune": _finetune}
    first = next(iter(records.values()))
    lead = f"{first['model']}: INT8 attention in a trained model, on real text."
    body = (
        "<header>\n<h1>INT8 attention in a real model</h1>\n"
        f"{html.paragraph(lead, kind='lead')}</header>\n"
        + "".join(cards[part](record) for part, record in records.items())
        + html.card("Where the figures come from", *map(_provenance, records.items()))
    )
    write_text(path, html.page("sagebwd evidence", body))


def _colours(arms):
    grey = {SIXTEEN: "fpa"}
    return {**html.colours([a for a in arms if a not in grey]), **grey}


def _percent(value):
    """A cell of a table, marked where it is too large to be usable."""
    return (f"{100 * value:.2f}", "" if value <= USABLE else "bad")


def _layers(record):
    rows = record["rows"]
    sums, css = totals(rows), _colours(rows[0]["errors"])
    said = "; ".join(f"`{arm}` {words}" for arm, words in verdicts(rows).items())
    charts = []
    for tensor in TENSORS:
        chart = Chart(f"{tensor}, relative L2 error", "layer", log_y=True, whole_x=True)
        for arm in sums:
            points = [(r["layer"], r["errors"][arm][tensor]) for r in rows]
            chart.lines.append(Line(arm, css[arm], points, dots=True))
        charts.append(chart)
    for key, title in (("max_logit", "Largest logit"), ("first_key", "Share of the first key")):
        chart = Chart(title, "layer", zero=True, whole_x=True)
        chart.lines.append(Line(title, "fpa", [(r["layer"], r[key]) for r in rows], dots=True))
        charts.append(chart)
    words = (
        f"Every attention layer at {record['sequences']} × {record['tokens']} tokens: what each "
        "kind of attention makes of the very q, k, v and dO (bfloat16) that the layer has there, "
        "against exact attention in float64. Relative L2 errors in percent, RMS over layers. In "
        "the RMS over heads, a head whose gradient is tiny weighs as much as any other. "
        f"`{SIXTEEN}` is PyTorch's attention in bfloat16, the yardstick."
    )
    by_head = totals(rows, "head_errors")
    whole = [
        [f"`{arm}`", *(_percent(errors[arm][t]) for errors in (sums, by_head) for t in TENSORS)]
        for arm in sums
    ]
    heads = [f"{t}, heads" for t in TENSORS]
    titles = ["layer", "largest logit", "share of the first key", ("attention", "words"), *TENSORS]
    cells = [
        [
            str(r["layer"]),
            f"{r['max_logit']:.1f}",
            f"{r['first_key']:.3f}",
            (f"`{arm}`", "words"),
            *(_percent(errors[t]) for t in TENSORS),
        ]
        for r in rows
        for arm, errors in r["errors"].items()
    ]
    return html.card(
        "Layer by layer",
        html.paragraph(f"Worst layers: {said}.", css, "verdict"),
        html.paragraph(words, css),
        html.table(["attention", *TENSORS, *heads], whole, css),
        html.legend({arm: css[arm] for arm in sums}),
        html.charts(map(to_svg, charts)),
        html.details("Figures of every layer", html.table(titles, cells, css)),
    )


def _gradients(record):
    arms = record["arms"]
    css, kinds = _colours(arms), list([*arms.values()][0]["errors"])
    bars = Bars(
        "Gradients of all layers together, relative error",
        kinds,
        [(a, css[a], [found["errors"][k]["all"] for k in kinds]) for a, found in arms.items()],
    )
    charts = [bars_to_svg(bars)]
    for kind in kinds:
        chart = Chart(f"{kind}, relative error", "layer", log_y=True, whole_x=True)
        for arm, found in arms.items():
            points = list(enumerate(found["errors"][kind]["layers"]))
            chart.lines.append(Line(arm, css[arm], points, dots=True))
        charts.append(to_svg(chart))
    rows = []
    for arm, found in arms.items():
        kind, worst = worst_of(found["errors"])
        rows.append(
            [
                f"`{arm}`",
                f"{found['loss_difference']:+.4f}",
                *(_percent(found["errors"][k]["all"]) for k in kinds),
                _percent(worst["worst"]),
                f"{kind}, layer {worst['worst_layer']}",
            ]
        )
    words = (
        f"The whole model on {record['sequences']} × {record['tokens']} tokens, against exact "
        f"attention (loss {record['loss']:.4f}). Weights and all but attention are float32. "
        "Relative L2 errors of the gradients of the projections, in percent, over all layers and "
        "of the worst one."
    )
    return html.card(
        "Loss and gradients of the whole model",
        html.paragraph(words, css),
        html.table(["attention", "loss", *kinds, "worst", "which"], rows, css),
        html.legend({arm: css[arm] for arm in arms}),
        html.charts(charts),
    )


def _finetune(record):
    found = summary(record["runs"])
    css = _colours(found)
    rows = []
    for arm, s in found.items():
        mean = None if arm == SIXTEEN or s["difference_mean"] is None else s["difference_mean"]
        rows.append(
            [
                f"`{arm}`",
                f"{s['before']:.4f}",
                _with_bar(f"{s['after']:.4f}", s["scatter"]),
                "–" if mean is None else _with_bar(f"{mean:+.4f}", s["difference_scatter"]),
                "–" if mean is None else " ".join(f"{d:+.4f}" for d in s["difference"]),
            ]
        )
    p = record["plan"]
    words = (
        f"{p['steps']} steps of {p['batch']} × {p['context']} tokens (AdamW, learning rate "
        f"{p['lr']:g}) from the same weights. A seed is an order of the batches, and all kinds of "
        "attention get the same orders. Held-out loss under the attention of the run, mean and "
        f"standard deviation over seeds, and the difference to `{SIXTEEN}` with the same seed."
    )
    gaps = Chart(f"Held-out loss minus that of {SIXTEEN}", "seed", zero=True, whole_x=True)
    losses = Chart("Training loss, first seed", "step")
    for arm, s in found.items():
        mine = [run for run in record["runs"] if run["arm"] == arm]
        losses.lines.append(Line(arm, css[arm], list(enumerate(mine[0]["losses"]))))
        if arm != SIXTEEN and s["difference"]:
            points = list(zip([run["seed"] for run in mine], s["difference"]))
            gaps.lines.append(Line(arm, css[arm], points, dots=True))
    return html.card(
        "Fine-tuning",
        html.paragraph(verdict(found), css, "verdict"),
        html.paragraph(words, css),
        html.table(
            ["attention", "before", "after", f"against `{SIXTEEN}`", "seed by seed"], rows, css
        ),
        html.legend({arm: css[arm] for arm in found}),
        html.charts([to_svg(c) for c in (gaps, losses) if c.lines]),
    )


def _with_bar(mean, bar):
    return mean if bar is None else f"{mean} ± {bar:.4f}"


def _provenance(item):
    part, record = item
    where = ", ".join(f"{k} {v}" for k, v in record["machine"].items())
    clean = {True: "", False: ", with changes", None: ""}[record["clean"]]
    named = lambda items: "; ".join(f"{name}: {text}" for name, text in items.items())
    items = {
        "command": f"`{record['command']}`",
        "commit": f"{record['commit'] or 'not known'}{clean}, {record['date']}",
        "machine": where,
        "text": record["text"],
        "recipes": named(record["recipes"]),
        "kernels": named(record.get("kernels", {})),
    }
    row = lambda name, value: f"<dt>{escape(name)}</dt><dd>{html.prose(value)}</dd>\n"
    rows = "".join(row(*item) for item in items.items() if item[1])
    return f"<h3>{part}</h3>\n<dl>\n{rows}</dl>\n"
