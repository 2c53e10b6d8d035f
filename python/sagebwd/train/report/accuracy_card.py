# SPDX-License-Identifier: Apache-2.0
"""Easy and hard inputs: the record of ``sagebwd report`` as a card."""

from ...pages import html
from ...pages.svg import Bars, Chart, Line, bars_to_svg, share, to_svg

_RECIPES = ("paper", "vectorwise")
_GRADIENTS = ("dQ", "dK", "dV")
_NAMES = {
    "outlier": "outliers everywhere",
    "channels": "outlier channels",
    "sink": "sink, first key",
    "sink_middle": "sink, middle",
    "sinks": "four sinks",
    "previous": "sharp heads",
    "delimiters7": "delimiters",
    "long": "long rows",
}


def accuracy_card(record):
    """``record["page"]``, where there is one, is the address of the whole report."""
    css = html.colours(_RECIPES)
    worst = {r: _worst_gradients(record, r) for r in _RECIPES}
    sigmas = sorted({s for kind, s in worst["paper"] if kind == "gaussian"})
    hard = [key for key in worst["paper"] if key[0] != "gaussian"]
    easy = Chart("Gaussian inputs, worst gradient", "σ of Q and K", log_y=True)
    easy.x_ticks = {s: f"{s:g}" for s in sigmas}
    for recipe in _RECIPES:
        points = [(s, worst[recipe]["gaussian", s]) for s in sigmas]
        easy.lines.append(Line(recipe, css[recipe], points, dots=True))
    bars = Bars(
        "Hard inputs, worst gradient",
        [_NAMES.get(kind, kind) for kind, _ in hard],
        [(r, css[r], [worst[r][key] for key in hard]) for r in _RECIPES],
    )
    most = {r: max(worst[r][key] for key in hard) for r in _RECIPES}
    first, last = sigmas[0], sigmas[-1]
    case = record["cases"][0]
    words = (
        f"Before any training: one call on made-up inputs ({case['n']} tokens, {case['heads']} "
        f"heads of {case['d']}), against exact attention in float64. The worst of dQ, dK and dV is "
        f"off by {_both(worst, ('gaussian', first))} on easy inputs (σ = {first:g}) and by up to "
        f"{share(most['paper'])} under `paper`, {share(most['vectorwise'])} under `vectorwise` on "
        "hard ones, of which `sagebwd trace --help` says what they are. "
        f"At σ = {last:g} it is {_both(worst, ('gaussian', last))}: "
        "the sharper the softmax, the more the rounding of Q and K weighs."
    )
    page, more = record.get("page"), "The whole accuracy report: every tensor, every limit"
    return html.card(
        "Accuracy on easy and hard inputs",
        html.paragraph(words, css),
        html.legend(css),
        html.charts([to_svg(easy), bars_to_svg(bars)]),
        f"<p>{html.link(page, more)}</p>\n" if page else "",
    )


def _worst_gradients(record, recipe):
    """{(kind, sigma): largest relative error of a gradient}."""
    return {
        (c["inputs"], c["sigma"]): max(c["tensors"][t]["rel_l2"] for t in _GRADIENTS)
        for c in record["cases"]
        if c["recipe"] == recipe and not c["lift"]
    }


def _both(worst, key):
    return " and ".join(f"{share(worst[r][key])} under `{r}`" for r in _RECIPES)
