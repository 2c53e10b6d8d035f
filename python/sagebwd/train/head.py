# SPDX-License-Identifier: Apache-2.0
"""Output matrix and cross-entropy in one, over slices of tokens, so that the logits of a whole
micro-batch (tokens x vocabulary) never exist. Gradients are computed in the forward, while the
logits are there."""

import torch

#: Logits held at a time, in elements.
_LOGITS = 1 << 28


def head_loss(x, weight, targets, slice_fn=None):
    """Mean cross-entropy of targets [n] under logits x·weightᵀ; x [n, c], weight [v, c].
    ``slice_fn``: a compiled version of :func:`slice_loss`."""
    return _HeadLoss.apply(x, weight, targets, slice_fn or slice_loss)


def slice_loss(x, weight, targets, scale, with_grad):
    """(sum of losses, d loss / d x, d loss / d weight) of a slice; the gradients times scale."""
    logits = (x @ weight.mT).float()
    lse = torch.logsumexp(logits, -1, keepdim=True)
    at = targets[:, None]
    loss = (lse - logits.gather(-1, at)).sum()
    if not with_grad:
        return loss, None, None
    columns = torch.arange(logits.shape[1], device=x.device)
    share = torch.exp(logits - lse)
    dlogits = (torch.where(columns == at, share - 1, share) * scale).to(x.dtype)
    return loss, dlogits @ weight, dlogits.mT @ x


def slice_rows(tokens, vocab):
    """Tokens of a slice. Slices are equal if that takes only a few more of them, because equal
    slices are compiled once."""
    least = -(-tokens * vocab // _LOGITS)
    equal = next((n for n in range(least, 2 * least + 1) if tokens % n == 0), least)
    return -(-tokens // equal)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, slice_fn):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        tokens, scale = x.shape[0], 1.0 / x.shape[0]
        rows = slice_rows(tokens, weight.shape[0])
        need = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss = torch.zeros((), device=x.device)
        dx = torch.empty_like(x) if need else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if need else None
        with torch.autocast(device, enabled=False):
            w = weight.to(dtype)
            for at in range(0, tokens, rows):
                part = slice(at, at + rows)
                part_loss, part_dx, part_dw = slice_fn(
                    x[part].to(dtype), w, targets[part], scale, need
                )
                loss += part_loss
                if need:
                    dx[part] = part_dx
                    dweight += part_dw
        ctx.save_for_backward(dx, dweight)
        ctx.dtypes = x.dtype, weight.dtype
        return loss * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        dx, dweight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        return (dx * dloss).to(x_dtype), (dweight * dloss).to(weight_dtype), None, None
