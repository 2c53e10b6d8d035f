# SPDX-License-Identifier: Apache-2.0
"""Does a causal attention look at the future? ``sagebwd.leaks`` replaces later tokens and compares
the bits of earlier results. It takes any attention function, of this library or not."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import arguments
from ..attention import attention
from ..recipe import Recipe, as_recipe

#: Where the tokens that change begin: the first block, its edges, octaves of blocks, and between.
CUTS = (1, 2, 15, 17, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 511, 513)


@dataclass(frozen=True)
class Change:
    """What one comparison found in the results of tokens before ``cut``."""

    case: str
    cut: int
    rows: int  # results of one token and head that were compared
    changed: int  # of those, how many have another bit
    relative: float  # L2 norm of the change over that of the results; inf with a new NaN or Inf


@dataclass(frozen=True, repr=False)
class Leaks:
    """The answer of :func:`leaks`: true in an ``if`` if something leaked, a table in ``print``."""

    changes: tuple[Change, ...]
    repeats: bool  # two equal calls had equal bits; if not, a change of bits shows nothing

    def __bool__(self) -> bool:
        return any(change.changed for change in self.changes)

    def worst(self, case: str) -> Change:
        """The cut with the largest change."""
        found = [change for change in self.changes if change.case == case]
        if not found:
            names = tuple(dict.fromkeys(change.case for change in self.changes))
            raise ValueError(f"leaks: expected a case of {names}, got {case!r}")
        return max(found, key=lambda change: (change.relative, change.changed))

    def __str__(self) -> str:
        cases = list(dict.fromkeys(change.case for change in self.changes))
        width = max(map(len, cases))
        lines = [f"{'what was done':{width}}  earlier results changed  by at most  from token"]
        for case in cases:
            worst = self.worst(case)
            rows = sum(c.rows for c in self.changes if c.case == case)
            changed = sum(c.changed for c in self.changes if c.case == case)
            share = f"{changed} of {rows}"
            size = "-" if not changed else _size(worst.relative)
            at = "-" if not changed else str(worst.cut)
            lines.append(f"{case:{width}}  {share:>23}  {size:>10}  {at:>10}")
        if not self.repeats:
            lines.append("Two equal calls gave different bits: compare the sizes, not the counts.")
        elif self:
            lines.append("Later tokens change earlier results.")
        else:
            lines.append("No later token changed a bit of an earlier result.")
        return "\n".join(lines)

    __repr__ = __str__


def _size(relative: float) -> str:
    return "NaN or Inf" if math.isinf(relative) else f"{100 * relative:.2g} %"


def leaks(
    fn: Callable[..., Any] | None = None,
    *,
    tokens: int = 384,
    heads: int = 2,
    key_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    layout: str = "bshd",
    seed: int | None = None,
    decode: bool = False,
    recipe: str | Recipe = "vectorwise",
) -> Leaks:
    """Replaces later tokens in many ways and reports which earlier results change, bit for bit.

    >>> print(sagebwd.leaks(lambda q, k, v: sagebwd.attention(q, k, v, causal=True)))

    fn
        A causal attention: ``fn(q, k, v)`` gives the output, or a tuple of the output and the
        log-sum-exp [b, h, s]. None: ``sagebwd.attention(…, causal=True, recipe=recipe)``.
    tokens, heads, key_heads, head_dim, dtype, device, layout
        Of the inputs that ``fn`` gets.
    seed
        Of the inputs; None draws fresh ones.
    decode
        Also ask ``fn`` for the last queries alone, with all keys (the last query sees the last
        key), as generation with a cache does.

    The cases: tokens from a cut on become other values, 20 times as large, zero, NaN or Inf, in q,
    k and v together and in each alone; the tokens before the cut are computed alone (``prefix``);
    and the inputs of TransformerEngine#3248. What is not causal to the last bit trains on what
    generation cannot see.
    """
    tokens = arguments.integer("leaks: tokens", tokens, 2, 2**20, "an int of 2 or more")
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"leaks: layout: expected 'bshd' or 'bhsd', got {layout!r}")
    fn = fn or _own(layout, as_recipe(recipe))
    probe = _Probe(fn, layout, decode)
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def draw(h: int) -> Tensor:
        values = torch.randn(1, h, tokens, head_dim, generator=generator)
        return values.to(device, dtype)

    inputs = [draw(h) for h in (heads, key_heads or heads, key_heads or heads)]
    other = [draw(t.shape[1]) for t in inputs]
    repeats = probe.repeats(inputs)
    changes = []
    for cut in (c for c in CUTS if c < tokens):
        changes += probe.compare(inputs, other, cut)
    changes += probe.published([t[:, :, :1] for t in inputs])
    return Leaks(tuple(changes), repeats)


def _own(layout, recipe):
    options = dict(causal=True, layout=layout, recipe=recipe, return_lse=True)
    return lambda q, k, v: attention(q, k, v, **options)


class _Probe:
    """Calls the function. Inputs here are [1, h, s, d]; results are the output [h, s, d] and, if
    there is one, the log-sum-exp [h, s, 1]."""

    def __init__(self, fn, layout, decode):
        self.fn, self.layout, self.decode = fn, layout, decode

    def call(self, inputs):
        turned = [t.transpose(1, 2).contiguous() if self.layout == "bshd" else t for t in inputs]
        with torch.no_grad():
            result = self.fn(*turned)
        out, *rest = result if isinstance(result, (tuple, list)) else (result,)
        if not isinstance(out, Tensor) or out.shape[:-1] != turned[0].shape[:-1]:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"leaks: expected fn(q, k, v) to return an output like q, {list(turned[0].shape)}, "
                f"got {got}"
            )
        found = [(out.transpose(1, 2) if self.layout == "bshd" else out)[0]]
        lse = rest[0] if rest else None
        if isinstance(lse, Tensor) and lse.shape == inputs[0].shape[:3]:
            found.append(lse[0].unsqueeze(-1))
        return [t.detach().to("cpu", torch.float64) for t in found]

    def repeats(self, inputs):
        return not _changed_rows(self.call(inputs), self.call(inputs)).any()

    def compare(self, inputs, other, cut):
        """Every case with tokens from ``cut`` on."""
        before = self.call(inputs)
        changes = []

        def look(case, after):
            changes.append(_change(case, cut, before, after, slice(0, cut)))

        def replace(make, which=(0, 1, 2)):
            changed = [t.clone() for t in inputs]
            for i in which:
                changed[i][:, :, cut:] = make(i)[:, :, cut:]
            return self.call(changed)

        look("other values", replace(lambda i: other[i]))
        look("20 times as large", replace(lambda i: 20 * other[i]))
        look("zeros", replace(lambda i: torch.zeros_like(other[i])))
        for i, name in enumerate("qkv"):
            look(f"other values of {name}", replace(lambda i: 20 * other[i], (i,)))
        for i, name in enumerate("qkv"):
            for value in (math.nan, math.inf):
                word = f"{value} in {name}".replace("nan", "NaN").replace("inf", "Inf")
                look(word, replace(lambda i: torch.full_like(other[i], value), (i,)))
        look("prefix: those tokens are not there", self.call([t[:, :, :cut] for t in inputs]))
        if self.decode:
            alone = self.call([inputs[0][:, :, cut:], *inputs[1:]])
            last = [t[:, cut:] for t in before]
            changes.append(_change("decode: the last queries alone", cut, last, alone, slice(None)))
        return changes

    def published(self, like):
        """TransformerEngine#3248: all queries and keys are one, a value is tiny and a later one is
        large. A scale that both share rounds the first to zero."""
        ones = [torch.ones_like(t).repeat(1, 1, 128, 1) for t in like[:2]]
        changes = []
        for power, large, cut in ((-20, 1, 16), (-10, 1024, 64)):
            v = torch.zeros_like(ones[1])
            v[:, :, 0, 0] = 2.0**power
            before = self.call([*ones, v])
            v = v.clone()
            v[:, :, cut, 0] = large
            case = f"TransformerEngine#3248: 2^{power}, then {large}"
            changes.append(_change(case, cut, before, self.call([*ones, v]), slice(0, cut)))
        return changes


def _changed_rows(before, after):
    """Which results of one token and head have another bit, in the output or in the log-sum-exp."""
    rows = [~((b == a) | (b.isnan() & a.isnan())).all(-1) for b, a in zip(before, after)]
    return torch.stack(rows).any(0)


def _change(case, cut, before, after, tokens):
    before, after = ([t[:, tokens] for t in results] for results in (before, after))
    rows = _changed_rows(before, after)
    relative = max(map(_relative, before, after))
    return Change(case, cut, rows.numel(), int(rows.sum()), relative)


def _relative(before, after):
    # The log-sum-exp of a row without keys is -inf, before and after.
    difference = torch.where(before == after, 0.0, after - before).norm().item()
    norm = torch.where(before.isfinite(), before, 0.0).norm().item()
    if difference == 0:
        return 0.0
    relative = difference / norm if norm else math.inf
    return relative if math.isfinite(relative) else math.inf
