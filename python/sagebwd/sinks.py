# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: one logit per head that takes part in every softmax and has no value.

A sink z turns out into out · sigmoid(lse - z) and lse into log(exp(lse) + exp(z)). Both are made
from the results of attention without it, and gradients reach q and k through lse.
"""

import torch


def check(sinks, heads, device):
    """Raises unless there is one sink for each head of q."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks: expected a torch.Tensor, got {type(sinks).__name__}")
    if tuple(sinks.shape) != (heads,) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks: expected one float for each of q's {heads} heads, got {sinks.dtype} of shape "
            f"{tuple(sinks.shape)}"
        )
    if sinks.device != device:
        raise ValueError(f"sinks: expected q's device {device}, got {sinks.device}")


def add(out, lse, sinks, tokens_first=True):
    """out and lse with sinks [h]. out is [b, s, h, d], or [b, h, s, d] without ``tokens_first``,
    and lse [b, h, s]; or packed, [t, h, d] and [h, t]. Queries that see no key keep an out of 0,
    and their lse is the sink."""
    sinks = sinks.float()[:, None]
    blind = lse == -torch.inf
    # A finite number, so that a sink of -inf (none at all) gives no NaN there.
    finite = lse.masked_fill(blind, torch.finfo(lse.dtype).min)
    share = torch.sigmoid(_apart(finite - sinks))
    if tokens_first:
        share = share.transpose(-1, -2)
    out = (out * share[..., None]).to(out.dtype)
    return out, torch.where(blind, sinks, torch.logaddexp(_apart(finite), sinks))


def _apart(x):
    """x with gaps between its elements. On a CPU, PyTorch computes functions of neighbours in
    vectors, and the last few of a tensor one by one, which rounds otherwise: a token's bits would
    depend on how many follow. Elements with gaps are all computed one by one."""
    return torch.stack((x, x), -1)[..., 0] if x.device.type == "cpu" else x
