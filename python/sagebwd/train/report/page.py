# SPDX-License-Identifier: Apache-2.0
"""The page: verdict, curves, accuracy on easy and hard inputs, bias, audits, errors by layer,
samples, and where it all comes from."""

from datetime import datetime, timezone
from html import escape
from pathlib import Path

from ...pages import html
from ...pages.svg import Band, Chart, Line, smoothed, thinned, to_svg
from ..config import FIELDS
from ..files import write_text
from ..json_text import dumps
from .accuracy_card import accuracy_card
from .bias_card import bias_card
from .noise import (
    compared_with,
    differences,
    differing,
    late_evals,
    noise_of,
    repeats_of,
    running_mean,
    speed_bar,
)
from .runs import reference_of
from .verdict import noise_words, paired_words, signed, speed_words, table_rows, verdict

_TENSORS = ("O", "dQ", "dK", "dV")
_ATTENTION = {name for name, f in FIELDS.items() if f.metadata["section"] == "attention"}
#: Nats per character of held-out text up to which a model writes words worth reading.
READABLE = 1.5


def write_report(
    runs, path, layers=None, command="", title="Training with INT8 attention", accuracy=None,
    bias=None,
):  # fmt: skip
    """Writes ``path`` (HTML) and, beside it, its figures as JSON. ``layers``: {recipe: [{"layer",
    "errors", "max_logit", "verdict"}, ...]} from ``sagebwd.diagnose``; ``accuracy``: the record of
    ``sagebwd report``; ``bias``: that of ``sagebwd.train.bias``. Returns the verdict."""
    css = html.colours([r.name for r in runs])
    said = verdict(runs)
    body = (
        _header(runs, title, css)
        + _tiles(runs, css)
        + html.card(
            "Verdict",
            html.paragraph(said, css, "verdict"),
            *(html.paragraph(words(runs), css) for words in (noise_words, speed_words)),
            html.table(*table_rows(runs), css),
        )
        + _differences(runs, css)
        + _curves(runs, css)
        + (accuracy_card(accuracy) if accuracy else "")
        + (bias_card(bias, ("Wq", "Wk")) if bias else "")
        + _audits(runs, css)
        + _layers(layers or {})
        + _samples(runs, css)
        + _provenance(runs, command)
    )
    write_text(path, html.page(title, body))
    figures = _figures(runs, layers, said, accuracy, bias)
    write_text(Path(path).with_suffix(".json"), dumps(figures) + "\n")
    return said


def _header(runs, title, css):
    c, s = runs[0].config, runs[0].summary
    names = ", ".join(f"`{r.name}`" for r in runs)
    words = (
        f"A Llama of {s['parameters'] / 1e6:.1f}M parameters ({c['layers']} layers, width "
        f"{c['width']}, {c['heads']} heads of {c['width'] // c['heads']}, context {c['context']}"
        f"{', QK-norm' if c['qk_norm'] else ''}), trained on {_count(s['tokens'])} tokens, "
        f"{_count(c['tokens_per_step'])} a step: {names}. {_what_differs(runs)}"
    )
    return f"<header>\n<h1>{escape(title)}</h1>\n{html.paragraph(words, css, 'lead')}</header>\n"


def _what_differs(runs):
    base = reference_of(runs)
    if base is None:
        return ""
    more = set().union(*(differing(base, r) for r in compared_with(runs))) - _ATTENTION
    words = "Same data in the same order, same initial weights; only the attention differs."
    if more:
        words = f"Besides attention they differ in {', '.join(sorted(more))}."
    notes = [f"`{r.name}` repeats `{base.name}` with other seeds" for r in repeats_of(runs)]
    return f"{words} {'; '.join(notes)}, to show the noise." if notes else words


def _count(n):
    if n >= 1e6:
        return f"{n / 1e6:.1f}M"
    return f"{n / 1e3:.0f}K" if n >= 10_000 else str(n)


def _tiles(runs, css):
    """One per run that is compared, and one for the reference and what it cannot resolve."""
    base = reference_of(runs)
    if base is None:
        tiles = [
            html.tile(f"`{r.name}`, held-out loss", f"{r.eval_loss:.4f}", "", css, css[r.name])
            for r in runs
        ]
        return f'<div class="tiles">\n{"".join(tiles)}</div>\n'
    noise = noise_of(runs)
    tiles = [
        html.tile(
            f"`{base.name}`, held-out loss",
            f"{base.eval_loss:.4f}",
            f"± {noise.loss:.4f}, the noise of equal runs" if repeats_of(runs) else "",
            css,
            css[base.name],
        )
    ]
    for run in compared_with(runs):
        ratio, bar = run.speed / base.speed, speed_bar(run, base, noise)
        tiles.append(
            html.tile(
                f"`{run.name}` against `{base.name}`",
                signed(run.eval_loss - base.eval_loss),
                f"± {noise.loss:.4f} in held-out loss; {ratio:.2f}× ± {bar:.2f} the speed",
                css,
                css[run.name],
            )
        )
    return f'<div class="tiles">\n{"".join(tiles)}</div>\n'


def _curves(runs, css):
    steps, wall = Chart("Training loss", "step"), Chart("Training loss over time", "seconds")
    for run in runs:
        points = run.curve()
        steps.lines.append(Line(run.name, css[run.name], thinned(points), thin=True))
        seconds = run.curve("seconds")
        wall.lines.append(Line(run.name, css[run.name], thinned(smoothed(seconds))))
    for run in runs:
        steps.lines.append(Line(run.name, css[run.name], thinned(smoothed(run.curve()))))
    evals = Chart("Held-out loss", "step")
    evals.lines = [
        Line(r.name, css[r.name], r.curve(kind="eval"), dots=True) for r in runs if r.of("eval")
    ]
    speed = Chart("Tokens per second", "step", zero=True)
    for run in runs:
        points = run.curve(y="tokens_per_second")
        speed.lines.append(Line(run.name, css[run.name], thinned(smoothed(points, 0.1))))
    return html.card(
        "Loss and speed",
        html.paragraph(
            "Faint: every step. Strong: running mean. The runs take turns on one machine, so what "
            "else it does slows all of them alike."
        ),
        html.legend(css),
        html.charts(map(to_svg, (steps, evals, wall, speed))),
    )


def _differences(runs, css):
    """Runs minus the reference, on axes of their own."""
    base = reference_of(runs)
    compared = compared_with(runs) if base else []
    if not compared:
        return ""
    charts, repeats = [], repeats_of(runs)
    if any(len(r.of("eval")) > 1 for r in compared):
        noise = noise_of(runs).loss
        wide = f"Held-out loss minus that of {base.name}"
        charts.append(_held_out_difference(wide, repeats + compared, base, noise, noise, css))
        charts.append(_held_out_difference(f"{wide}, finer", compared, base, noise, 0.0, css))
    charts += _step_differences(compared, base, css)
    words = (
        f"Curves that nearly coincide, with `{base.name}` subtracted. Grey is the noise: a line "
        "inside it shows nothing that another seed would not. Training loss is compared step by "
        "step on the same batch: faint, every step; strong, the running mean with a band of two "
        "standard errors. Early steps may leave the axes."
    )
    return html.card(
        "Difference to full precision",
        html.paragraph(paired_words(runs), css),
        html.paragraph(words, css),
        html.legend({r.name: css[r.name] for r in repeats + compared}, "noise of equal runs"),
        html.charts(map(to_svg, charts)),
    )


def _held_out_difference(title, shown, base, noise, at_least, css):
    """An axis that holds the second half of training, and ``at_least`` to both sides of zero."""
    late = [abs(d) for r in shown for d in late_evals(r, base)]
    most = 1.1 * max(at_least, *late) or 1e-6
    chart = Chart(title, "step", zero=True, y_range=(-most, most))
    for run in shown:
        points = differences(run, base, "eval")
        chart.lines.append(Line(run.name, css[run.name], points, dots=True))
    ends = [x for line in chart.lines for x, _ in line.points]
    chart.bands = [Band("fpa", [(x, -noise, noise) for x in (min(ends), max(ends))])]
    return chart


def _step_differences(compared, base, css):
    """One chart per run, all on one axis."""
    means = {r.name: running_mean(differences(r, base)) for r in compared}
    late = [abs(m) + 2 * e for all_ in means.values() for _, m, e in all_[len(all_) // 2 :]]
    most = 1.2 * max(late, default=0.0) or 1e-6
    for run in compared:
        colour, mean = css[run.name], thinned(means[run.name])
        chart = Chart(
            f"{run.name}: training loss minus that of {base.name}", "step", zero=True,
            y_range=(-most, most),
        )  # fmt: skip
        chart.bands = [Band(colour, [(x, m - 2 * e, m + 2 * e) for x, m, e in mean])]
        chart.lines = [
            Line(run.name, colour, thinned(differences(run, base)), thin=True),
            Line(run.name, colour, [(x, m) for x, m, _ in mean]),
        ]
        yield chart


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
        "Share of the strongest key": (lambda e: e.get("inputs", {}).get("sink_share"), False),
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
        html.charts(map(to_svg, charts)),
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
        html.charts(map(to_svg, charts)),
        html.details("Figures", html.table(titles, cells, css)),
    )


def _samples(runs, css):
    """Text of the models, if they have learned enough to write some."""
    texts = [(r, r.sample()) for r in runs if r.sample()]
    if not texts:
        return ""
    readable = [(r, text) for r, text in texts if r.nats_per_character() <= READABLE]
    if not readable:
        best = min(r.nats_per_character() for r, _ in texts)
        words = (
            f"Left out: at a held-out loss of {best:.1f} nats per character the models have "
            f"learned letters, not words. From {READABLE} down their text is worth reading."
        )
        return html.card("Sample text", html.paragraph(words))
    body = "".join(
        html.paragraph(f"`{r.name}`", css) + f"<pre>{escape(text)}</pre>\n" for r, text in readable
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


def _figures(runs, layers, said, accuracy, bias):
    noise = noise_of(runs) if reference_of(runs) else None
    return {
        "verdict": said,
        "noise": vars(noise) if noise else None,
        "runs": [
            {"name": r.name, "config": r.config, "summary": r.summary, "log": r.log} for r in runs
        ],
        "layers": layers or {},
        "accuracy": accuracy,
        "bias": bias,
    }
