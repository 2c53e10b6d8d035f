# SPDX-License-Identifier: Apache-2.0
"""Head dims for the hooks of trainers: latent attention has narrower values than keys."""

from torch.nn.functional import pad


def padded(q, k, v, scale):
    """q, k, v padded to one head dim that is a multiple of 8, and the scale of their original head
    dim. Channels of zeros change no logit; cut the result to v's width again."""
    width = -(-max(t.shape[-1] for t in (q, k, v)) // 8) * 8
    if scale is None and width != q.shape[-1]:
        scale = q.shape[-1] ** -0.5
    q, k, v = (t if t.shape[-1] == width else pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    return q, k, v, scale
