# SPDX-License-Identifier: Apache-2.0
"""The demo's results as one HTML page that needs nothing beside itself."""

import torch

from ...train.files import write_text
from ...train.report import html
from ...train.report.svg import Chart, Line, to_svg
from .arms import ARMS
from .pictures import image, matrix, strip


def write_page(record, pictures, path):
    body = (
        "<header>\n<h1>Sparse-linear attention in a video model</h1>\n"
        + html.paragraph(record["about"], kind="lead")
        + "</header>\n"
        + _results(record)
        + _frames(pictures)
        + _chosen(pictures)
        + _stage_1(record)
    )
    write_text(path, html.page("sagebwd SLA2", body))


def colours(arms):
    return {**html.colours([a for a in arms if a != "full"]), "full": "fpa"}


def verdict(arms):
    """What the figures say, in one sentence."""
    if not {"full", "sparse", "sla2"} <= set(arms):
        return ""
    full = arms["full"]["after"]["loss"]
    gone = []
    for when in ("before", "after"):
        gap = arms["sparse"][when]["loss"] - full
        if gap <= 0:
            return "Leaving blocks out costs nothing here."
        gone.append(1 - (arms["sla2"][when]["loss"] - full) / gap)
    return (
        f"Of what sparse attention loses against full attention, `sla2` wins back "
        f"{100 * gone[0]:.0f} % before training and {100 * gone[1]:.0f} % after it."
    )


def _results(record):
    arms = record["arms"]
    css = colours(arms)
    rows = [
        [
            f"`{name}`",
            (ARMS[name], "words"),
            f"{arm['before']['loss']:.4f}",
            f"{arm['after']['loss']:.4f}",
            f"{arm['before']['psnr']:.2f}",
            f"{arm['after']['psnr']:.2f}",
            f"{arm['step_seconds']:.3f}",
        ]
        for name, arm in arms.items()
    ]
    chart = Chart("Training loss after the change of attention", "step")
    for name, arm in arms.items():
        points = list(enumerate(_smooth(arm["losses"])))
        chart.lines.append(Line(name, css[name], points))
    titles = [
        "attention", ("what it is", "words"), "loss before", "after", "PSNR before", "after",
        "seconds per step",
    ]  # fmt: skip
    return html.card(
        "Results",
        html.paragraph(verdict(arms), css, "verdict"),
        html.paragraph(record["plan"]),
        html.table(titles, rows, css),
        html.legend({name: css[name] for name in arms}),
        html.charts([to_svg(chart)]),
    )


def _smooth(values, share=0.9):
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = share * mean + (1 - share) * value, share * weight + 1 - share
        out.append(mean / weight)
    return out


def _frames(pictures):
    rows = "".join(
        f"<figure>{html.paragraph(name)}{image(strip(clip), name, '100%')}</figure>\n"
        for name, clip in pictures["clips"].items()
    )
    return html.card(
        "Predicted frames",
        html.paragraph(
            "The first frames are given, the others come in noise (t = 0.4). One step of each "
            "model predicts them; no training saw the clip."
        ),
        rows,
    )


def _chosen(pictures):
    cells = ""
    for name, mask in pictures["masks"].items():
        cells += f"<figure>{html.paragraph(name)}{image(matrix(mask), name, '100%')}</figure>\n"
    view = image(strip(pictures["view"]), "what one block of queries sees", "100%")
    return html.card(
        "Chosen blocks",
        html.paragraph(
            "Rows are blocks of queries, columns blocks of keys, both boxes of space and time; "
            "dark where a query block sees a key block. The linear branch stands for the rest."
        ),
        f'<div class="charts thirds">{cells}</div>',
        html.paragraph(
            "One block of queries (white) and the blocks of keys that it sees, in one head; the "
            "rest of the clip is dimmed."
        ),
        view,
    )


def _stage_1(record):
    rows = [[name, *(f"{x:.3f}" for x in figures)] for name, figures in record["stage_1"].items()]
    return html.card(
        "Stage 1",
        html.paragraph(
            "Relative error of the layer's output against full attention on held-out data, mean "
            "over heads, with chosen blocks as in use; softness says how far the mask that carries "
            "the gradient is from hard."
        ),
        html.table(["layer", "means compared", "trained router", "softness"], rows),
    )


def seen_by(model, mask, video, query):
    """The clip with all but the key boxes that a query box sees dimmed, the query box white."""
    size = model.size
    tokens = torch.zeros(size.tokens, device=video.device)
    for block in mask[query].nonzero().flatten().tolist():
        tokens[block * size.block_k : (block + 1) * size.block_k] = 1.0
    own = torch.zeros_like(tokens)
    own[query * size.block_q : (query + 1) * size.block_q] = 1.0
    spread = lambda x: model.video(x[None, :, None].expand(-1, -1, 3 * size.patch**2))[0]
    light, mine = spread(tokens), spread(own)
    dimmed = video * (0.25 + 0.75 * light) + 0.6 * (1 - light) * (1 - mine)
    return dimmed * (1 - 0.6 * mine) + 0.6 * mine
