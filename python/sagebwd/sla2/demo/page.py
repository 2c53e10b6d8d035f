# SPDX-License-Identifier: Apache-2.0
"""The demo's results as one HTML page that needs nothing beside itself."""

import torch

from ...pages import html
from ...pages.svg import Chart, Line, to_svg
from ...train.files import write_text
from .arms import ARMS
from .pictures import image, matrix, some_frames, strip
from .summary import FIGURES, verdict


def write_page(record, clip, pictures, model, path):
    """``pictures``: the tensors of each arm of one seed; ``clip``: what they predict a part of."""
    kinds = list(dict.fromkeys(run["arm"] for run in record["runs"]))
    css = {**html.colours([kind for kind in kinds if kind != "full"]), "full": "fpa"}
    body = (
        "<header>\n<h1>Sparse-linear attention in a video model</h1>\n"
        + html.paragraph(record["about"], kind="lead")
        + "</header>\n"
        + _checks(record, css)
    )
    for keep, arms in record["summary"].items():
        body += _results(record, keep, arms, css)
        body += _frames(keep, clip, {arm: t for arm, t in pictures.items() if _shown(arm, keep)})
    chosen = [arm for arm, tensors in pictures.items() if tensors.get("masks")]
    if chosen:
        arm = next((arm for arm in chosen if arm.kind == "sla2"), chosen[-1])
        body += _chosen(arm, clip, pictures[arm], model)
    write_text(path, html.page("sagebwd SLA2", body + _stage_1(record)))


def _shown(arm, keep):
    return arm.kind == "full" or f"{arm.keep:g}" == keep


def _seen(keep):
    return f"{100 * float(keep):g} % of the blocks seen"


def _checks(record, css):
    rows = [
        ["passed" if check["passed"] else "failed", _seen(check["keep"]), (check["what"], "words")]
        for check in record["checks"]
    ]
    if not rows:
        return ""
    return html.card("What the seeds say together", html.table(["", "", ("", "words")], rows, css))


def _results(record, keep, arms, css):
    several = len({run["seed"] for run in record["runs"]}) > 1
    cell = lambda value, digits: (
        f"{value[0]:.{digits}f}" + (f" ± {value[1]:.{digits}f}" if several else "")
    )
    rows = [
        [f"`{kind}`", (ARMS[kind], "words")]
        + [cell(figures[name], 4 if name.startswith("loss") else 2) for name in FIGURES]
        for kind, figures in arms.items()
    ]
    chart = Chart("Training loss after the change of attention, first seed", "step")
    for run in record["runs"]:
        first = run["seed"] == record["settings"]["seed"][0]
        if first and (run["arm"] == "full" or f"{run['keep']:g}" == keep):
            points = list(enumerate(_smooth(run["losses"])))
            chart.lines.append(Line(run["arm"], css[run["arm"]], points))
    seeds = " Means and deviations over seeds." if several else ""
    return html.card(
        f"Results, {_seen(keep)}",
        html.paragraph(verdict(keep, arms), css, "verdict"),
        html.paragraph(record["plan"] + seeds),
        html.table(["attention", ("what it is", "words"), *FIGURES], rows, css),
        html.legend({kind: css[kind] for kind in arms}),
        html.charts([to_svg(chart)]),
    )


def _smooth(values, share=0.9):
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = share * mean + (1 - share) * value, share * weight + 1 - share
        out.append(mean / weight)
    return out


def _frames(keep, clip, pictures):
    tensors = next((t for t in pictures.values() if t), None)
    if tensors is None:
        return ""
    clips = {"the clip": some_frames(clip), "with noise, as the models get it": tensors["noisy"]}
    clips |= {f"{arm.kind}: {ARMS[arm.kind]}": t["frames"] for arm, t in pictures.items()}
    rows = "".join(
        f"<figure>{html.paragraph(name)}{image(strip(clip.float()), name, '100%')}</figure>\n"
        for name, clip in clips.items()
    )
    return html.card(
        f"Predicted frames, {_seen(keep)}",
        html.paragraph(
            "The first frames are given, the others come in noise (t = 0.4). One step of each "
            "model predicts them; no training saw the clip."
        ),
        rows,
    )


def _chosen(arm, clip, tensors, model, most=12):
    masks = list(tensors["masks"].items())
    some = masks[:: -(-len(masks) // most)]
    cells = "".join(
        f"<figure>{html.paragraph(name)}"
        f"{image(matrix(mask), name, '100%', squares=True)}</figure>\n"
        for name, mask in some
    )
    mask = some[-1][1]
    view = seen_by(model, mask, clip, mask.shape[0] * 5 // 8)
    return html.card(
        f"Chosen blocks of {arm.kind}, {_seen(arm.keep)}",
        html.paragraph(
            "Rows are blocks of queries, columns blocks of keys, both boxes of space and time; "
            "dark where a query block sees a key block. The linear branch stands for the rest."
        ),
        f'<div class="charts thirds">{cells}</div>',
        html.paragraph(
            f"One block of queries (white) and the blocks of keys that it sees, {some[-1][0]}; the "
            "rest of the clip is dimmed."
        ),
        image(strip(some_frames(view)), "what one block of queries sees", "100%"),
    )


def _stage_1(record):
    rows = [
        [run["arm"], _seen(run["keep"]), name, *(f"{x:.3f}" for x in figures)]
        for run in record["runs"]
        if run["seed"] == record["settings"]["seed"][0]
        for name, figures in run["stage_1"].items()
    ]
    return html.card(
        "Stage 1",
        html.paragraph(
            "Relative error of the layer's output against full attention on held-out data, mean "
            "over heads, with chosen blocks as in use; softness says how far the mask that carries "
            "the gradient is from hard."
        ),
        html.table(["arm", "", "layer", "means compared", "trained router", "softness"], rows),
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
