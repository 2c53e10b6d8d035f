# SPDX-License-Identifier: Apache-2.0
"""The page: verdict, curves, audits, errors by layer, speed, samples, and where it all comes
from."""

from datetime import datetime, timezone
from html import escape
from pathlib import Path

from ..json_text import dumps
from . import html
from .runs import reference_of
from .svg import Chart, Line, smoothed, thinned, to_svg
from .verdict import signed, table_rows, verdict

_TENSORS = ("O", "dQ", "dK", "dV")


def write_report(runs, path, layers=None, command="", title="Training with INT8 attention"):
    """Writes ``path`` (HTML) and, beside it, its figures as JSON. ``layers``: {recipe: [{"layer",
    "errors", "max_logit", "verdict"}, ...]} from ``sagebwd.diagnose``. Returns the verdict."""
    css = html.colours([r.name for r in runs])
    said = verdict(runs)
    body = (
        _header(runs, title, css)
        + _tiles(runs, css)
        + html.card(
            "Verdict",
            html.paragraph(said, css, "verdict"),
            html.table(*table_rows(runs), css),
        )
        + _curves(runs, css)
        + _audits(runs, css)
        + _layers(layers or {})
        + _samples(runs, css)
        + _provenance(runs, command)
    )
    Path(path).write_text(html.page(title, body), encoding="utf-8")
    Path(path).with_suffix(".json").write_text(dumps(_figures(runs, layers, said)) + "\n")
    return said


def _header(runs, title, css):
    c, s = runs[0].config, runs[0].summary
    names = ", ".join(f"`{r.name}`" for r in runs)
    words = (
        f"A Llama of {s['parameters'] / 1e6:.1f}M parameters ({c['layers']} layers, width "
        f"{c['width']}, {c['heads']} heads of {c['width'] // c['heads']}, context {c['context']}"
        f"{', QK-norm' if c['qk_norm'] else ''}), trained on {_count(s['tokens'])} tokens, "
        f"{_count(c['tokens_per_step'])} a step: {names}. Same data in the same order, same "
        "initial weights; only the attention differs."
    )
    return f"<header>\n<h1>{escape(title)}</h1>\n{html.paragraph(words, css, 'lead')}</header>\n"


def _count(n):
    if n >= 1e6:
        return f"{n / 1e6:.1f}M"
    return f"{n / 1e3:.0f}K" if n >= 10_000 else str(n)


def _tiles(runs, css):
    base, out = reference_of(runs), ""
    for run in runs:
        note = f"{run.speed:.0f} tokens/s"
        if base is not None and run is not base:
            note = f"{signed(run.eval_loss - base.eval_loss)} against `{base.name}`; {note}"
        out += html.tile(
            f"`{run.name}`, eval loss", f"{run.eval_loss:.4f}", note, css, css[run.name]
        )
    return f'<div class="tiles">\n{out}</div>\n'


def _curves(runs, css):
    steps, wall = Chart("Training loss", "step"), Chart("Training loss over time", "seconds")
    for run in runs:
        points = run.curve()
        steps.lines.append(Line(run.name, css[run.name], thinned(points), thin=True))
        seconds = run.curve("seconds")
        wall.lines.append(Line(run.name, css[run.name], thinned(smoothed(seconds))))
    for run in runs:
        steps.lines.append(Line(run.name, css[run.name], thinned(smoothed(run.curve()))))
    charts = [steps, wall]
    evals = Chart("Held-out loss", "step")
    evals.lines = [
        Line(r.name, css[r.name], r.curve(kind="eval"), dots=True) for r in runs if r.of("eval")
    ]
    base = reference_of(runs)
    if base is not None and len(runs) > 1:
        charts.append(_difference(runs, base, css))
    charts.append(evals)
    words = (
        "Faint: every step. Strong: running mean. The difference to full precision is taken step "
        "by step on the same batch, so the noise of the data cancels."
    )
    return html.card(
        "Loss",
        html.paragraph(words),
        html.legend(css),
        f'<div class="charts">\n{"".join(map(to_svg, charts))}</div>\n',
    )


def _difference(runs, base, css):
    chart = Chart(f"Difference to {base.name}", "step", zero=True)
    want = dict(base.curve())
    for run in runs:
        if run is base:
            continue
        points = [(x, y - want[x]) for x, y in run.curve() if x in want]
        chart.lines.append(Line(run.name, css[run.name], thinned(points), thin=True))
        chart.lines.append(Line(run.name, css[run.name], thinned(smoothed(points, 0.08))))
    return chart


def _audits(runs, css):
    audited = [r for r in runs if r.of("audit")]
    if not audited:
        return ""
    pick = {
        "dQ, relative L2 error": (lambda e: e["rel_l2"]["dQ"], True),
        "dK, relative L2 error": (lambda e: e["rel_l2"]["dK"], True),
        "dK, projection of the error": (lambda e: e["projection"]["dK"], False),
        "Share of dS rounded to zero": (lambda e: e["dead_zone"], False),
        "Largest logit": (lambda e: e["max_logit"], True),
    }
    charts = []
    for title, (value, log) in pick.items():
        chart = Chart(title, "step", log_y=log, zero=not log)
        for run in audited:
            points = [(e["step"], value(e)) for e in run.of("audit") if value(e) is not None]
            if points:
                chart.lines.append(Line(run.name, css[run.name], points, dots=True))
        if chart.lines:
            charts.append(chart)
    alarms = {r.name: sum(bool(e["alarms"]) for e in r.of("audit")) for r in audited}
    words = (
        "Every few steps one layer, in turn, is computed again in float64 on a held-out sequence. "
        "The projection is the part of the error along the true gradient: it does not average out "
        "over a batch. Audits with an alarm: "
        + ", ".join(
            f"`{n}` {k} of {len(r.of('audit'))}" for (n, k), r in zip(alarms.items(), audited)
        )
        + "."
    )
    return html.card(
        "Gradient audit during training",
        html.paragraph(words, css),
        html.legend({r.name: css[r.name] for r in audited}),
        f'<div class="charts">\n{"".join(map(to_svg, charts))}</div>\n',
    )


def _layers(layers):
    if not layers:
        return ""
    css = html.colours(list(layers))
    charts = []
    for tensor in _TENSORS:
        chart = Chart(f"{tensor}, relative L2 error", "layer", log_y=True, whole_x=True)
        for name, rows in layers.items():
            points = [(r["layer"], r["errors"][tensor]) for r in rows if tensor in r["errors"]]
            chart.lines.append(Line(name, css[name], points, dots=True))
        charts.append(chart)
    cells = []
    for name, rows in layers.items():
        for r in rows:
            errors = [
                f"{r['errors'][t]:.4f}" if t in r["errors"] else "–" for t in (*_TENSORS, "P", "dS")
            ]
            cells.append(
                [str(r["layer"]), (f"`{name}`", "words"), *errors, f"{r['max_logit']:.1f}",
                 (r["verdict"], "words")]
            )  # fmt: skip
    titles = ["layer", ("recipe", "words"), *_TENSORS, "P", "dS", "max logit", ("verdict", "words")]
    words = (
        "Every layer of the trained full-precision model on one held-out sequence: what INT8 "
        "attention would have computed instead, against float64."
    )
    return html.card(
        "Errors by layer after training",
        html.paragraph(words),
        html.legend(css),
        f'<div class="charts">\n{"".join(map(to_svg, charts))}</div>\n',
        html.details("Figures", html.table(titles, cells, css)),
    )


def _samples(runs, css):
    texts = [(r, r.sample()) for r in runs if r.sample()]
    if not texts:
        return ""
    body = "".join(
        html.paragraph(f"`{r.name}`", css) + f"<pre>{escape(text)}</pre>\n" for r, text in texts
    )
    return html.card("Sample text", body)


def _provenance(runs, command):
    s = runs[0].summary
    items = {
        "command": f"`{command}`" if command else "",
        "machine": s["machine"],
        "torch": s["torch"],
        "data": f"{runs[0].config['data'] or 'the standard library of Python'}, "
        f"fingerprint {s['data']}",
        "seeds": f"weights {runs[0].config['seed']}, data order {runs[0].config['data_seed']}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    rows = "".join(
        f"<dt>{escape(k)}</dt><dd>{html.prose(str(v))}</dd>\n" for k, v in items.items() if v
    )
    return html.card("Where the figures come from", f"<dl>\n{rows}</dl>\n")


def _figures(runs, layers, said):
    return {
        "verdict": said,
        "runs": [
            {"name": r.name, "config": r.config, "summary": r.summary, "log": r.log} for r in runs
        ],
        "layers": layers or {},
    }
