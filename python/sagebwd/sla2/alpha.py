# SPDX-License-Identifier: Apache-2.0
"""α: how much of the output comes from the sparse branch. The rest comes from the linear one."""

import math

import torch
from torch import nn

KINDS = ("block", "head", "mass")


def make_alpha(kind, heads, head_dim, rows, device=None, dtype=None):
    if kind == "mass":
        return Mass(heads, head_dim, device, dtype)
    if kind in KINDS:
        return Table(heads, rows if kind == "block" else 1, device, dtype)
    raise ValueError(f"alpha: expected one of {', '.join(KINDS)}, got {kind!r}")


class Table(nn.Module):
    """α = σ(logit), learned for each head and ``rows`` places along the sequence. Calls with more
    or fewer query blocks read the table by linear interpolation. One row is one α for the head."""

    uses_norms = False

    def __init__(self, heads, rows, device=None, dtype=None):
        super().__init__()
        # α is the share of a row's probability that chosen blocks hold: most of it.
        self.logit = nn.Parameter(torch.ones(heads, rows, device=device, dtype=dtype))

    @property
    def places(self):
        return self.logit.shape[1]

    def forward(self, rows):
        """α of each query block, [h, rows]."""
        return torch.sigmoid(self.resampled(rows))

    def resampled(self, rows):
        """The logits [h, rows] of another length, in float32."""
        logit, places = self.logit.float(), self.places
        if rows == places:
            return logit
        if places == 1:
            return logit.expand(-1, rows)
        at = (torch.arange(rows, device=logit.device) + 0.5) * (places / rows) - 0.5
        at = at.clamp(0, places - 1)
        low = at.floor().long()
        high = (low + 1).clamp(max=places - 1)
        return torch.lerp(logit.index_select(1, low), logit.index_select(1, high), at - low)

    def extra_repr(self):
        return f"{self.logit.shape[0]} heads, {self.places} rows"


class Mass(nn.Module):
    """α = σ(L - ln n - β) for each query: the norms of the two branches weigh them. L is the
    log-sum-exp over chosen keys, n the norm of the linear branch, and e^β says how many times
    larger exp(q·k/sqrt(d)) is than φ(q)·φ(k). For q = 0 that is d, with which β starts."""

    uses_norms = True

    def __init__(self, heads, head_dim, device=None, dtype=None):
        super().__init__()
        self.beta = nn.Parameter(
            torch.full((heads,), math.log(head_dim), device=device, dtype=dtype)
        )

    def forward(self, lse, norm):
        """α [b, h, ...] of the logarithm of the sparse branch's norm and the linear branch's
        norm."""
        # Features that float32 cannot hold give a norm of 0, and α = 1.
        log_norm = norm.clamp(min=torch.finfo(torch.float32).tiny).log()
        beta = self.beta.float().view(-1, *[1] * (lse.dim() - 2))
        return torch.sigmoid(lse - log_norm - beta)

    def extra_repr(self):
        return f"{self.beta.shape[0]} heads"
