# SPDX-License-Identifier: Apache-2.0
"""Does the gradient error average out over a batch? Measures, at a checkpoint, the error of the
weight gradients of every attention projection, accumulated over more and more tokens.

    python -m sagebwd.train.bias RUN                        16K to 1M tokens of the run's own data
    python -m sagebwd.train.bias RUN --tokens 16K,256K,2M
    python -m sagebwd.train.bias RUN --recipes "fpa,vectorwise,dither=paper rounding=dither"

For each batch the model runs once with exact (float32) attention and once with every recipe. The
gradients of Wq, Wk, Wv and Wo are added up. At every number of tokens the relative error
|g - g_exact| / |g_exact| is recorded, over all layers and of the worst layer. Rounding noise
shrinks as tokens grow; what stays or grows is bias. For comparison, the gradient noise of the batch
itself is estimated from the scatter of its parts: an error far below it cannot be seen in training.

Writes bias.json and bias.html to the run's directory, or to --out.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ..pages import html
from ..suggest import Parser
from . import checkpoint
from .batch_plan import plan_batch
from .compare import parse_arms
from .config import count
from .errors import BadInput, exit_code, writing
from .files import write_text
from .json_text import dumps
from .load import load_model
from .machine import describe_machine
from .report.bias_card import PROJECTIONS, bias_card, tokens_text, verdict

DEFAULT_TOKENS = "16K,32K,64K,128K,256K,512K,1M"


class Measurement:
    """Gradient sums of one model under several kinds of attention."""

    def __init__(self, loaded, arms):
        self.model, self.autocast = loaded.model, loaded.autocast
        self.arms = {"exact": replace(loaded.config, attention="exact"), **arms}
        self.sums = {name: self._zeros() for name in self.arms}
        self.squares = [dict.fromkeys(PROJECTIONS, 0.0) for _ in self.model.blocks]
        self.parts = 0

    def _zeros(self):
        like = lambda p: torch.zeros_like(p, dtype=torch.float32)
        return [
            (like(b.attention.qkv.weight), like(b.attention.out.weight)) for b in self.model.blocks
        ]

    def add(self, rows):
        """One batch of sequences [n, context + 1] under every arm."""
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        self.model.clock.step += 1  # new seeds for dithered rounding
        parameters = [
            w for b in self.model.blocks for w in (b.attention.qkv.weight, b.attention.out.weight)
        ]
        for name, arm in self.arms.items():
            self.model.set_attention(arm)
            with self.autocast():
                loss = self.model(tokens, targets)
            grads = torch.autograd.grad(loss, parameters)
            for (qkv, out), gq, go in zip(self.sums[name], grads[::2], grads[1::2]):
                qkv += gq
                out += go
            if name == "exact":
                self._note_squares(grads)
        self.parts += 1

    def _note_squares(self, grads):
        pairs = zip(grads[::2], grads[1::2])
        norms = [[g.square().sum() for g in self._projections(i, *p)] for i, p in enumerate(pairs)]
        for layer, values in zip(self.squares, torch.tensor(norms).tolist()):
            for name, value in zip(PROJECTIONS, values):
                layer[name] += value

    def _projections(self, layer, qkv, out):
        rows = self.model.blocks[layer].attention.row_slices()
        return [qkv[rows["Wq"]], qkv[rows["Wk"]], qkv[rows["Wv"]], out]

    def table(self):
        """{arm: {projection: {"all": error, "worst": error, "worst_layer": index}}}, and the
        gradient noise as arm "noise"."""
        exact = [self._projections(i, *pair) for i, pair in enumerate(self.sums["exact"])]
        size = [[g.double().square().sum().item() for g in layer] for layer in exact]
        result = {}
        for name in self.arms:
            if name == "exact":
                continue
            error = [
                [(a - b).double().square().sum().item() for a, b in zip(mine, layer)]
                for mine, layer in zip(
                    (self._projections(i, *pair) for i, pair in enumerate(self.sums[name])), exact
                )
            ]
            result[name] = _by_projection(error, size)
        if self.parts > 1:
            noise = [
                [scatter(layer[p], whole, self.parts) for p, whole in zip(PROJECTIONS, sizes)]
                for layer, sizes in zip(self.squares, size)
            ]
            result["noise"] = _by_projection(noise, size)
        return result


def scatter(squares, whole, parts):
    """An unbiased estimate of the squared deviation of a sum of ``parts`` random vectors, from the
    sum of their squared norms and the squared norm of their sum."""
    return max(0.0, parts * (squares - whole / parts) / (parts - 1))


def _by_projection(error, size):
    """Relative errors from squared norms [layer][projection]."""
    result = {}
    for i, name in enumerate(PROJECTIONS):
        column = [(e[i], s[i]) for e, s in zip(error, size)]
        layers = [math.sqrt(e / s) if s > 0 else 0.0 for e, s in column]
        total = sum(s for _, s in column)
        result[name] = {
            "all": math.sqrt(sum(e for e, _ in column) / total) if total > 0 else 0.0,
            "worst": max(layers),
            "worst_layer": layers.index(max(layers)),
        }
    return result


def measure(run, recipes, tokens, changes=None, say=print):
    """Yields the record of a checkpoint, {"rows": [{"tokens", "errors"}], ...}, after every row."""
    loaded = load_model(run, **(changes or {}))
    config, device = loaded.config, loaded.device
    arms = parse_arms(recipes, config)
    arms.pop("exact", None)
    measurement = Measurement(loaded, arms)
    batches = loaded.unseen()
    first, done = loaded.sequences_read, 0
    # At least two parts up to the first row: the noise is estimated from their scatter.
    part = max(1, tokens[0] // config.context // 2) * config.context
    plan = plan_batch(replace(config, tokens_per_step=part), 1, device)
    say(f"{loaded.path}: {config.describe_attention()}; {describe_machine(device)}")
    record = {
        "checkpoint": str(loaded.path),
        "step": loaded.step,
        "config": json.loads(config.to_json()),
        "machine": describe_machine(device),
        "torch": torch.__version__,
        "rows": [],
    }
    for goal in tokens:
        while done * config.context < goal:
            measurement.add(batches.rows(first + done, plan.micro))
            done += plan.micro
        record["rows"].append({"tokens": done * config.context, "errors": measurement.table()})
        say(row_text(record["rows"][-1]))
        yield record


def row_text(row):
    lines = [
        f"{tokens_text(row['tokens']):>6} tokens     " + "".join(f"{p:>16}" for p in PROJECTIONS)
    ]
    for name, errors in row["errors"].items():
        cells = "".join(f"{errors[p]['all']:9.4f} ({errors[p]['worst']:.3f})" for p in PROJECTIONS)
        lines.append(f"  {name:16}{cells}")
    return "\n".join(lines)


def write_page(record, path):
    titles = ["tokens", ("attention", "words")]
    titles += [t for p in PROJECTIONS for t in (p, "worst layer")]
    rows = []
    for row in record["rows"]:
        for name, errors in row["errors"].items():
            cells = [
                c
                for p in PROJECTIONS
                for c in (f"{errors[p]['all']:.4f}", f"{errors[p]['worst']:.4f}")
            ]
            rows.append([tokens_text(row["tokens"]), (f"`{name}`", "words"), *cells])
    c = record["config"]
    lead = (
        f"Gradients of the attention weights at the checkpoint of step {record['step']}: "
        f"{c['layers']} layers, width {c['width']}, context {c['context']}."
    )
    css = html.colours([n for n in record["rows"][0]["errors"] if n != "noise"])
    body = (
        f"<header>\n<h1>INT8 attention over a batch</h1>\n"
        f"{html.paragraph(lead, css, 'lead')}</header>\n"
        + bias_card(record)
        + html.card(
            "Figures",
            html.paragraph(
                "Relative error over all layers, and of the worst layer. `noise` is the gradient "
                "noise of the batch itself: what a batch of that size cannot tell apart anyway."
            ),
            html.table(titles, rows, css),
        )
        + html.card(
            "Where the figures come from",
            f"<dl><dt>checkpoint</dt><dd>{html.prose(record['checkpoint'])}</dd>\n"
            f"<dt>machine</dt><dd>{html.prose(record['machine'])}</dd>\n"
            f"<dt>torch</dt><dd>{record['torch']}</dd></dl>",
        )
    )
    write_text(path, html.page("sagebwd bias", body))


def main(arguments=None):
    parser = Parser(
        prog="python -m sagebwd.train.bias",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="directory of a run of sagebwd.train, or one checkpoint")
    parser.add_argument("--recipes", default="fpa,paper,vectorwise", help="arms, as in --compare")
    parser.add_argument("--tokens", default=DEFAULT_TOKENS, help=f"default {DEFAULT_TOKENS}")
    parser.add_argument("--out", help="directory of bias.json and bias.html (default: the run's)")
    for name in ("data", "device", "threads", "micro_batch", "dtype"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, help=f"instead of the run's own {name}")
    args = parser.parse_args(arguments)
    given = {n: getattr(args, n) for n in ("data", "device", "threads", "micro_batch", "dtype")}
    changes = {name: value for name, value in given.items() if value is not None}

    def work():
        tokens = _numbers(args.tokens)
        out = Path(args.out) if args.out else checkpoint.find(args.run).parent.parent
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        for record in measure(args.run, args.recipes, tokens, changes):  # kept as it grows
            with writing(out):
                write_text(out / "bias.json", dumps(record, indent=1) + "\n")
                write_page(record, out / "bias.html")
        print(f"{verdict(record).replace('`', '')}\nThe page is {out / 'bias.html'}.")

    return exit_code("sagebwd.train.bias", work)


def _numbers(text):
    try:
        tokens = sorted(count(t) for t in text.split(","))
    except (ValueError, OverflowError):
        tokens = [0]
    if tokens[0] < 1:
        raise BadInput(f"tokens: expected numbers with commas, such as 16K,1M, got {text!r}")
    return tokens


if __name__ == "__main__":
    sys.exit(main())
