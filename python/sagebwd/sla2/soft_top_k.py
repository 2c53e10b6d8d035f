# SPDX-License-Identifier: Apache-2.0
"""SoftTop-k: a differentiable stand-in for "the k largest of a row"."""

import torch

from .. import arguments

# Halvings of the interval that holds the shift. Float64 needs the most.
_HALVINGS = 64


def soft_top_k(scores, k, temperature):
    """m = σ(scores / temperature + shift), with one shift for each row so that the row sums to k.

    The lower the temperature, the closer m is to 1 for the k largest scores and to 0 for the
    others. Gradients reach the scores and nothing else. Computed in float32 at least.
    """
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point():
        raise TypeError("scores: expected a tensor of floating-point numbers")
    if scores.dim() == 0 or scores.shape[-1] == 0:
        raise ValueError(f"scores: expected rows of scores, got shape {tuple(scores.shape)}")
    k = arguments.integer("k", k, 1, scores.shape[-1], f"1 to {scores.shape[-1]} of a row")
    if isinstance(temperature, torch.Tensor):
        if temperature.requires_grad:
            raise NotImplementedError("temperature: expected no gradient, got requires_grad")
        above = bool((temperature > 0).all())
    else:
        above = temperature > 0
    if not above:
        raise ValueError(f"temperature: expected numbers above 0, got {temperature}")
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    return _SoftTopK.apply(scores, k, temperature)


class _SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, k, temperature):
        m = _mask(scores, k, temperature)
        ctx.save_for_backward(m)
        ctx.temperature = temperature
        return m

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dm):
        (m,) = ctx.saved_tensors
        slope = m * (1 - m)
        total = slope.sum(-1, keepdim=True)
        # The shift moves with the scores so that the sum stays: the weighted mean of dm drops out.
        # A row whose entries are all 0 or 1 to the last bit has no slope and passes nothing on.
        mean = (slope * dm).sum(-1, keepdim=True) / total.where(total > 0, 1.0)
        return slope * (dm - mean) / ctx.temperature, None, None


def _mask(scores, k, temperature):
    blocks = scores.shape[-1]
    if k == blocks:
        return torch.ones_like(scores)
    # Measured from the k-th largest score the shift is a small number, of which floating point
    # has many: at low temperatures the sum depends on its last digits.
    x = (scores - scores.topk(k, dim=-1).values[..., -1:]) / temperature
    # Entries are at most k / blocks with the lower bound and at least that with the upper one.
    even = torch.logit(torch.tensor(k / blocks, dtype=x.dtype)).item()
    low = even - x.amax(-1, keepdim=True)
    high = even - x.amin(-1, keepdim=True)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = torch.sigmoid(x + middle).sum(-1, keepdim=True) > k
        low, high = low.where(above, middle), high.where(~above, middle)
    return torch.sigmoid(x + (low + high) / 2)
