# SPDX-License-Identifier: Apache-2.0
"""Any head dims from 1 to 256, and values of another size than queries and keys. The operators take
one head dim that is a multiple of 8. For other calls channels of zeros are added before and cut off
after. That is exact: zeros add nothing to a logit, and those of v give zeros in out.

:func:`forward` and :func:`backward` are those of ops.py for all these head dims.
"""

import torch.nn.functional as F

from . import ops

LARGEST = 256


def fits(q, v):
    """Whether the operators take q, k and v of such head dims as they are."""
    d = q.shape[-1]
    return d % 8 == 0 and v.shape[-1] == d


def pad(q, k, v, options):
    """q, k, v and options as the operators take them."""
    if fits(q, v):
        return q, k, v, options
    q, k, v, scale = to_one_head_dim(q, k, v, options.softmax_scale)
    return q, k, v, options._replace(softmax_scale=scale)


def to_one_head_dim(q, k, v, scale):
    """q, k, v with one head dim, a multiple of 8, and the scale, whose default is that of the head
    dim before."""
    d = q.shape[-1]
    wanted = _up(max(d, v.shape[-1]))
    if scale is None and wanted != d:
        scale = d**-0.5
    return _wide(q, wanted), _wide(k, wanted), _wide(v, wanted), scale


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
    padded = (dout, padded_q, padded_k, padded_v, out, lse, dlse, options)
    grads = ops.backward(*padded, **switches)
    return tuple(cut(grad, t.shape[-1]) for grad, t in zip(grads, (q, k, v)))


def cut(t, width):
    """The first channels, packed as densely as a call without padding would give them."""
    return t if t.shape[-1] == width else t[..., :width].clone()


def _up(d):
    return (d + 7) // 8 * 8


def _wide(t, width):
    if t.shape[-1] == width:
        return t
    t = F.pad(t, (0, width - t.shape[-1]))
    return t if t.stride(-1) == 1 else t.contiguous()
