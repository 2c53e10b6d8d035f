# SPDX-License-Identifier: Apache-2.0
"""Any head dims from 1 to 256. The operators take multiples of 8, and v of another one than q and
k. For other calls channels of zeros are added before and cut off after. That is exact: zeros add
nothing to a logit, and those of v give zeros in out.

Where GPU kernels that are tuned serve one head dim alone, v is padded to that of q and k, or these
to v's: they are several times faster than the plain kernels that would serve the call as it is.

:func:`forward` and :func:`backward` are those of _ops/attention.py for all these head dims.
"""

import torch.nn.functional as F

from ._ops import attention as ops

LARGEST = 256


def fits(q, v):
    """Whether the operators take q, k and v of such head dims as they are."""
    d, dv = q.shape[-1], v.shape[-1]
    return head_dims(d, dv, ops.tuned_head_dim(q)) == (d, dv)


def head_dims(d, dv, tuned):
    """The head dims of q and k and of v that the operators get. ``tuned``: the largest one that
    tuned kernels of the device serve, see :func:`ops.tuned_head_dim`."""
    d, dv = _up(d), _up(dv)
    common = max(d, dv)
    return (common, common) if common <= tuned else (d, dv)


def pad(q, k, v, options):
    """q, k, v and options as the operators take them."""
    if fits(q, v):
        return q, k, v, options
    q, k, v, scale = padded(q, k, v, options.softmax_scale)
    return q, k, v, options._replace(softmax_scale=scale)


def padded(q, k, v, scale):
    """q, k, v with head dims that the operators take, and the scale, whose default is that of the
    head dim before."""
    return _widened(q, k, v, scale, *head_dims(q.shape[-1], v.shape[-1], ops.tuned_head_dim(q)))


def to_one_head_dim(q, k, v, scale):
    """The same with one head dim for all, as PyTorch's own operators want it."""
    common = _up(max(q.shape[-1], v.shape[-1]))
    return _widened(q, k, v, scale, common, common)


def forward(q, k, v, options, **switches):
    """:func:`ops.forward`."""
    if fits(q, v):
        return ops.forward(q, k, v, options, **switches)
    out, *others = ops.forward(*pad(q, k, v, options), **switches)
    return cut(out, v.shape[-1]), *others


def backward(dout, q, k, v, out, lse, dlse, options, **switches):
    """:func:`ops.backward`."""
    if fits(q, v):
        return ops.backward(dout, q, k, v, out, lse, dlse, options, **switches)
    padded_q, padded_k, padded_v, options = pad(q, k, v, options)
    dout, out = (_wide(t, padded_v.shape[-1]) for t in (dout, out))
    call = (dout, padded_q, padded_k, padded_v, out, lse, dlse, options)
    grads = ops.backward(*call, **switches)
    return tuple(cut(grad, t.shape[-1]) for grad, t in zip(grads, (q, k, v)))


def cut(t, width):
    """The first channels, packed as densely as a call without padding would give them."""
    return t if t.shape[-1] == width else t[..., :width].clone()


def _up(d):
    return max((d + 7) // 8 * 8, 8)  # PyTorch's function takes values without channels


def _widened(q, k, v, scale, d, dv):
    if scale is None and d != q.shape[-1]:
        scale = q.shape[-1] ** -0.5
    return _wide(q, d), _wide(k, d), _wide(v, dv), scale


def _wide(t, width):
    if t.shape[-1] == width:
        return t
    t = F.pad(t, (0, width - t.shape[-1]))
    return t if t.stride(-1) == 1 else t.contiguous()
