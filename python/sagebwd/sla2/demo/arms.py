# SPDX-License-Identifier: Apache-2.0
"""The kinds of attention that the demo compares. All start from the same weights."""

import copy

import torch
from torch import nn

from ...attention import attention
from .. import Attention, fit
from ..mix import mix
from .model import make_attention
from .sixteen_bit import sixteen_bit_attention

ARMS = {
    "full": "full attention, trained on",
    "sparse": "the blocks that the router of pooled means chooses, and nothing else",
    "v1": "the same blocks, plus a projection of the linear branch (SLA)",
    "identity": "SLA2 with the router of pooled means, α fitted",
    "sla2": "SLA2 with a trained router, α fitted",
    "sla2-16bit": "the same router and α, with 16-bit instead of INT8 products",
}

#: Arms that stage 1 prepares.
FITTED = ("identity", "sla2", "sla2-16bit")


class Sparse(Attention):
    """The sparse branch alone."""

    def over(self, q, k, v, lists, excluded):
        return attention(q, k, v, blocks=lists, **self.call)


class FirstVersion(Attention):
    """SLA: out = sparse + linear · W, with W = 0 at the start."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.projection = nn.Parameter(torch.zeros(self.heads, self.head_dim, self.head_dim))

    def over(self, q, k, v, lists, excluded):
        sparse = attention(q, k, v, blocks=lists, **self.call)
        linear, _ = self.linear(q, k, v, excluded)
        return sparse + torch.einsum("bshd,hde->bshe", linear, self.projection.to(linear.dtype))


class SixteenBit(Attention):
    """SLA2 whose sparse branch has PyTorch's products instead of INT8. α comes from a table."""

    def over(self, q, k, v, lists, excluded):
        sparse = sixteen_bit_attention(q, k, v, lists)
        linear, norm = self.linear(q, k, v, excluded)
        return mix(sparse, linear, *self.share(q, k, None, norm))


KINDS = {"sparse": Sparse, "v1": FirstVersion, "sla2-16bit": SixteenBit}


def make_arm(name, start, keep, recipe="vectorwise"):
    """The model with another kind of attention, before stage 1."""
    model = copy.deepcopy(start)
    for block in model.blocks:
        if name in KINDS:
            old = block.attend
            block.attend = make_attention(model.size, KINDS[name]).to(old.layout.device)
            block.attend.load_state_dict(old.state_dict(), strict=False)
        block.attend.keep = keep
        block.attend.call = dict(block.attend.call, recipe=recipe)
        for p in block.attend.alpha.parameters():
            p.requires_grad_(name in FITTED)
    return model


def fit_arm(name, model, batches, steps, seed):
    """Stage 1: the table that it gives."""
    return fit(model, batches, steps=steps, router=name != "identity", seed=seed)


def fitted_state(model):
    """What stage 1 changed: {name: tensor}."""
    parts = (".router.", ".alpha.")
    return {n: p.cpu() for n, p in model.state_dict().items() if any(part in n for part in parts)}
