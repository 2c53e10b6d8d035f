# SPDX-License-Identifier: Apache-2.0
"""The output: α · sparse + (1 - α) · linear."""

import torch


def mix(sparse, linear, alpha):
    """sparse and linear are [b, s, h, d], α is float32 [b or 1, h, s].

    On a GPU the time is that of moving the tensors, so no float32 copy of them is made. α is
    rounded to their dtype, which costs no more than rounding the result does; sums are float32.
    """
    return _Mix.apply(sparse, linear, alpha.transpose(1, 2)[..., None])


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sparse, linear, alpha):
        ctx.save_for_backward(sparse, linear, alpha)
        return torch.lerp(linear, sparse, alpha.to(sparse.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        sparse, linear, alpha = ctx.saved_tensors
        dalpha = None
        if ctx.needs_input_grad[2]:
            product = (sparse - linear).mul_(dout)
            dalpha = product.sum(-1, keepdim=True, dtype=torch.float32).sum_to_size(alpha.shape)
        # From the float32 α: 1 - α may be small, and has all its digits only there.
        return dout * alpha.to(dout.dtype), dout * (1 - alpha).to(dout.dtype), dalpha
