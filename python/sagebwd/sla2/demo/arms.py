# SPDX-License-Identifier: Apache-2.0
"""The kinds of attention that the demo compares. All start from the same weights."""

import copy

import torch
from torch import nn

from ...attention import attention
from ...linear import linear_attention
from .. import Attention, fit

ARMS = {
    "full": "full attention, trained on",
    "sparse": "the blocks that the router of pooled means chooses, and nothing else",
    "v1": "the same blocks, plus a projection of the linear branch (SLA)",
    "identity": "SLA2 with the router of pooled means, α fitted",
    "sla2": "SLA2 with a trained router, α fitted",
}


class FirstVersion(nn.Module):
    """SLA: out = sparse + linear · W, with W = 0 at the start."""

    def __init__(self, sla2):
        super().__init__()
        self.sla2 = sla2
        shape = (sla2.heads, sla2.head_dim, sla2.head_dim)
        self.projection = nn.Parameter(torch.zeros(shape, device=sla2.router.wq.device))
        for p in sla2.alpha.parameters():
            p.requires_grad_(False)

    def forward(self, q, k, v):
        lists = self.sla2.router.lists(q, k, self.sla2.keep)
        sparse = attention(q, k, v, blocks=lists, **self.sla2.call)
        linear = linear_attention(q, k, v, exclude=lists)
        return sparse + torch.einsum("bshd,hde->bshe", linear.float(), self.projection)


def make_arm(name, start, keep, batches, steps, recipe="vectorwise"):
    """(model, table of stage 1 or None)."""
    model = copy.deepcopy(start)
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    for layer in layers:
        layer.keep = 1 if name == "full" else keep
        layer.call = dict(layer.call, recipe=recipe)
    if name in ("identity", "sla2"):
        return model, fit(model, batches, steps=steps, router=name == "sla2")
    for layer in layers:
        for p in layer.alpha.parameters():
            p.requires_grad_(False)
            p.data.fill_(30.0)  # α = 1
    if name == "v1":
        for block in model.blocks:
            block.attend = FirstVersion(block.attend)
    return model, None
