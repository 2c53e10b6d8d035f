# SPDX-License-Identifier: Apache-2.0
"""The time of attention of the model's own shape on this machine, forward and backward, beside
PyTorch's attention in the same dtype."""

import contextlib
import statistics
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..._ops import attention as ops
from ...attention import attention, is_supported
from ..timing import DIRECTIONS, bursts

#: Tokens to time at. A CPU gets fewer heads as well.
TOKENS = {"cuda": (1024, 4096, 16384), "cpu": (1024, 2048)}
_CPU_HEADS = 4
_ROUNDS = {"cuda": 7, "cpu": 3}


@dataclass
class Timed:
    """Medians in milliseconds, forward and backward together."""

    tokens: int
    int8: float
    torch: float
    kernels: tuple  # which implementation served forward and backward

    @property
    def ratio(self):
        """Above 1: INT8 is faster."""
        return self.torch / self.int8


@dataclass
class _Contestant:
    call: object
    leaves: list
    grad: torch.Tensor
    context: object = contextlib.nullcontext
    times: dict = field(default_factory=lambda: {d: [] for d in DIRECTIONS})

    def forward(self):
        return self.call(*self.leaves)

    def backward(self, out, **kwargs):
        return torch.autograd.grad(out, self.leaves, self.grad, **kwargs)


def shape_of(examined):
    """(heads, key heads, head dim, causal) of most calls of self-attention that were compared."""
    found = Counter(
        (h, hk, d, e.causal)
        for e in examined
        for h, hk, sq, sk, d in [e.shape]
        if sq == sk and e.report.errors
    )
    return found.most_common(1)[0][0] if found else None


def measure(shape, device, recipe):
    """[Timed]; "" or why nothing was timed."""
    heads, key_heads, d, causal = shape
    if device == "cpu" and heads > _CPU_HEADS:
        key_heads = max(1, key_heads * _CPU_HEADS // heads)
        heads = key_heads * max(1, _CPU_HEADS // key_heads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    out = []
    for tokens in TOKENS[device]:
        make = lambda h: torch.randn(1, h, tokens, d, device=device, dtype=dtype)
        q, k, v, grad = make(heads), make(key_heads), make(key_heads), make(heads)
        support = is_supported(q, k, v, layout="bhsd", recipe=recipe)
        if not support:
            return [], support.reason
        leaves = [t.requires_grad_() for t in (q, k, v)]
        ours = lambda q, k, v: attention(q, k, v, layout="bhsd", causal=causal, recipe=recipe)
        theirs = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        pair = [_Contestant(call, leaves, grad) for call in (ours, theirs)]
        bursts(pair, device, _ROUNDS[device])
        int8, torch_ = (1e3 * statistics.median(c.times["both"]) for c in pair)
        out.append(Timed(tokens, int8, torch_, _kernels(leaves, causal, recipe)))
    return out, ""


def _kernels(leaves, causal, recipe):
    options = ops.Options(causal=causal, recipe=recipe.text())
    answers = (ops.explain(*leaves, options, is_backward=backward) for backward in (False, True))
    return tuple(next(name for name, state, _ in a if state == "chosen") for a in answers)
