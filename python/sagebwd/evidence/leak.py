# SPDX-License-Identifier: Apache-2.0
"""Can a model learn to read the future through shared scales?

    python -m sagebwd.evidence leak        # about three minutes on two cores

A small causal language model is trained on tokens drawn at random, anew in every step, one kind of
them rare. Nothing can be learnt but how rare: no causal model gets below the entropy. A loss below
that of the best causal predictor on the same tokens was told about later tokens, through scales
and means that they share with earlier ones.

In 4 bit nothing is planted: with one scale for all tokens of a head the leak is learnt from random
weights. In 8 bit two recipes of this library are trained, `paper`, whose scales are shared, and
`vectorwise`, the default. For `paper` something has to be planted: the keys of the rare token start
more than eighty times longer than the others, in one layer without a residual path around its
attention. With keys 20 times longer nothing was learnt in these few steps. `vectorwise` starts from
the same keys.

Writes leak.json and leak.html.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from .. import Recipe, attention
from ..pages import html
from ..pages.svg import Chart, Line, smoothed, thinned, to_svg
from ..suggest import Parser
from ..train.errors import BadInput, exit_code, writing
from ..train.files import write_text
from . import record

_TOKENS, _BATCH, _WIDTH, _HEADS = 16, 256, 64, 4
_RARE = 1 / 16  # probability of the rare token
_LEARNING_RATE = 2e-3
_LEVELS = 7  # of 4-bit codes


def _rounded(x, dims):
    """4-bit codes with one scale over ``dims``; the gradient is that of no rounding."""
    scale = x.detach().abs().amax(dims, keepdim=True).clamp_min(1e-30) / _LEVELS
    return x + (torch.round(x.detach() / scale) * scale - x.detach())


def _exact(q, k, v):
    """q, k, v: [batch, tokens, heads, channels]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _four_bit(dims):
    return lambda q, k, v: _exact(*(_rounded(x, dims) for x in (q, k, v)))


def _eight_bit(recipe):
    return lambda q, k, v: attention(q, k, v, causal=True, recipe=recipe)


@dataclass(frozen=True)
class Arm:
    name: str
    attend: object
    words: str
    layers: int
    steps: int
    planted: bool = False

    @property
    def residual(self):
        """Where keys are planted, nothing goes around the attention."""
        return not self.planted


ARMS = (
    Arm("4 bit, one scale per head", _four_bit((1, 3)), "nothing planted", 2, 1200),
    Arm("4 bit, one scale per token", _four_bit((3,)), "nothing planted", 2, 1200),
    Arm("paper", _eight_bit(Recipe.paper()), "long keys planted", 1, 300, True),
    Arm("vectorwise", _eight_bit(Recipe.vectorwise()), "long keys planted", 1, 300, True),
)
_COLOURS = dict(zip((a.name for a in ARMS), ("other1", "other2", "paper", "vectorwise")))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x, attend, residual):
        heads = (*x.shape[:2], _HEADS, _WIDTH // _HEADS)
        q, k, v = (t.reshape(heads) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        seen = self.out(attend(q, k, v).flatten(2))
        x = x + seen if residual else seen
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Predicts the next of two kinds of tokens."""

    def __init__(self, arm):
        super().__init__()
        self.residual = arm.residual
        self.embed = nn.Embedding(2, _WIDTH)
        self.place = nn.Parameter(0.3 * torch.randn(_TOKENS, _WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(arm.layers))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 2)
        if arm.planted:
            self._plant()

    @torch.no_grad()
    def _plant(self):
        """A direction that the rare token alone has, which the keys amplify."""
        direction = F.normalize(torch.randn(_WIDTH), dim=0)
        self.embed.weight.mul_(0.5)
        for rows in (self.embed.weight, self.place):
            rows -= (rows @ direction)[:, None] * direction
        self.embed.weight[1] += 3 * direction
        for block in self.blocks:
            block.qkv.weight[_WIDTH : 2 * _WIDTH] += 11 * torch.randn(_WIDTH, 1) * direction

    @torch.no_grad()
    def length_of_rare_keys(self, tokens):
        """Beside those of other tokens, in the first layer."""
        first = self.blocks[0]
        keys = first.qkv(first.norm_1(self.embed(tokens) + self.place))[..., _WIDTH : 2 * _WIDTH]
        lengths = keys.norm(dim=-1)
        return (lengths[tokens == 1].mean() / lengths[tokens == 0].mean()).item()

    def forward(self, tokens, attend):
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x, attend, self.residual)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Source:
    """Tokens, and the loss of the best causal predictor on them."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.share = torch.tensor([1 - _RARE, _RARE])

    def draw(self):
        many = torch.multinomial(self.share, _BATCH * _TOKENS, True, generator=self.random)
        return many.view(_BATCH, _TOKENS)

    def best(self, tokens):
        return -self.share[tokens[:, 1:]].log().mean().item()


def run(arm, steps, say):
    """Losses above that of the best causal predictor, in nats; below zero: told the future."""
    torch.manual_seed(0)
    source, model = Source(1), Model(arm)
    planted = model.length_of_rare_keys(source.draw()) if arm.planted else None
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0)
    curve, began = [], time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1, (step + 1) / 100) * (1 - 0.9 * step / steps)
        tokens = source.draw()
        loss = model(tokens, arm.attend)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((step + 1, loss.item() - source.best(tokens)))
        if (step + 1) % max(1, steps // 4) == 0:
            say(f"  {arm.name}: step {step + 1}, {sum(y for _, y in curve[-50:]) / 50:+.4f} nats")
    gains, exact = [], []
    with torch.no_grad():
        for _ in range(50):
            tokens = source.draw()
            gains.append(model(tokens, arm.attend).item() - source.best(tokens))
            exact.append(model(tokens, _exact).item() - source.best(tokens))
    return {
        "arm": arm.name,
        "words": arm.words,
        "layers": arm.layers,
        "steps": steps,
        "planted_length": planted,
        "above_best": sum(gains) / len(gains),
        "deviation": torch.tensor(gains).std().item() / len(gains) ** 0.5,
        "above_best_exact": sum(exact) / len(exact),
        "seconds": time.time() - began,
        "curve": thinned(smoothed(curve), 200),
    }


def _entropy():
    return -sum(p * torch.tensor(p).log().item() for p in (_RARE, 1 - _RARE))


def verdict(row):
    told = row["above_best"] < -max(3 * row["deviation"], 0.01 * _entropy())
    if not told:
        return "learnt nothing about the future"
    return f"reads the future: {-100 * row['above_best'] / _entropy():.0f} % of the entropy"


def write_page(figures, path):
    rows = figures["rows"]
    chart = Chart("Loss above the best causal predictor, nats", "step", zero=True)
    chart.y_range = (-0.12, 0.05)
    for row in rows:
        chart.lines.append(Line(row["arm"], _COLOURS[row["arm"]], row["curve"]))
    cells = [
        [
            (f"`{row['arm']}`", "words"),
            (_start(row), "words"),
            f"{row['above_best']:+.4f} ± {row['deviation']:.4f}",
            f"{row['above_best_exact']:+.4f}",
            (verdict(row), "words"),
        ]
        for row in rows
    ]
    titles = ["attention", "start", "nats", "the same weights, exact attention", "verdict"]
    body = (
        "<header>\n<h1>Reading the future through shared scales</h1>\n"
        + html.paragraph(
            "A causal language model on random tokens. None can get below the entropy, "
            f"{_entropy():.4f} nats, unless later tokens leak into earlier ones.",
            kind="lead",
        )
        + "</header>\n"
        + html.card(
            "What was learnt",
            html.table(titles, cells, _COLOURS),
            html.paragraph(
                "Below zero means: better than any causal model can be. With exact attention, as "
                "when tokens are generated one by one, what was learnt that way is gone, and the "
                "model is worse than one that knows nothing."
            ),
            html.legend(_COLOURS),
            html.charts([to_svg(chart)]),
        )
        + html.card(
            "What had to be planted",
            html.paragraph(
                "In 4 bit nothing: with one scale for all tokens of a head the leak is learnt from "
                "random weights. In 8 bit `paper` learns it where the keys of the rare token start "
                "as long as the table says, in one layer without a residual path around its "
                "attention; with keys 20 times longer nothing was learnt in as few steps. "
                "`vectorwise`, the default recipe, starts from the same keys and cannot show a "
                "leak, whatever is planted: no later token changes a bit of an earlier output.",
                _COLOURS,
            ),
            html.paragraph(f"`{figures['command']}`, commit {figures['commit']}"),
        )
    )
    write_text(path, html.page("sagebwd evidence leak", body))


def _start(row):
    if row["planted_length"] is None:
        return row["words"]
    return f"{row['words']}, {row['planted_length']:.0f} times longer"


def main(arguments):
    parser = Parser(
        prog="python -m sagebwd.evidence leak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", default="build/evidence", help="directory (default %(default)s)")
    parser.add_argument("--steps", type=int, help="of each model (default 1200 in 4 bit, else 300)")
    args = parser.parse_args(arguments)
    return exit_code("evidence leak", lambda: _work(args, arguments))


def _work(args, arguments):
    if args.steps is not None and args.steps < 1:
        raise BadInput(f"steps: expected 1 or more, got {args.steps}")
    out = Path(args.out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    stamp = record.stamp(["leak", *arguments], "cpu")
    rows = []
    for arm in ARMS:
        print(f"{arm.name}, {arm.words}", flush=True)
        rows.append(run(arm, args.steps or arm.steps, lambda text: print(text, flush=True)))
        print(f"  {rows[-1]['above_best']:+.4f} nats: {verdict(rows[-1])}", flush=True)
    figures = {**stamp, "entropy": _entropy(), "rows": rows}
    with writing(out):
        record.write(out, "leak", figures)
        write_page(figures, out / "leak.html")
    print(out / "leak.html")
