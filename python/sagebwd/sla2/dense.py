# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention with a mask of any numbers from 0 to 1, for stage 1 of training.

Written out over all pairs of tokens, so that gradients reach the mask also where it is 0. Some rows
(blocks of queries) are enough for a step, which bounds the cost.
"""

import torch
from torch.nn.functional import pad


class Rows:
    """Some blocks of queries against all keys; everything that does not depend on the mask.

    q [b, s, h, d] and k, v [b, sk, hk, d] of one layer; ``rows`` lists blocks of queries. Results
    are float32 [b, h, rows, block_q, d]. With ``causal`` a query sees no later key, and keys keep
    their mean.
    """

    def __init__(self, q, k, v, rows, block_q, block_k, causal=False):
        heads_first = lambda x: x.float().transpose(1, 2)
        q, k, v = map(heads_first, (q, k, v))
        if not causal:
            k = k - k.mean(2, keepdim=True)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        self.keys, self.block_k = k.shape[2], block_k
        tokens = q.shape[2]
        q = pad(q, (0, 0, 0, -tokens % block_q)).unflatten(2, (-1, block_q))[:, :, rows]
        place = torch.arange(block_q, device=q.device) + rows[:, None] * block_q
        self.valid = (place < tokens)[..., None]  # the last block may be short
        logits = torch.einsum("bhrqd,bhtd->bhrqt", q, k) / q.shape[-1] ** 0.5
        if causal:
            later = torch.arange(self.keys, device=q.device) > place[..., None]
            logits = logits.masked_fill(later, -torch.inf)
        self.top = logits.amax(-1, keepdim=True)
        self.weights = (logits - self.top).exp()
        self.v = v
        #: Full attention of these rows.
        self.full = self._values(self.weights) / self.weights.sum(-1, keepdim=True)
        self.phi_q = q.softmax(-1)
        phi_k = self._blocks(k.softmax(-1))
        # h = φ(K)ᵀ·[V, 1] of each key block.
        self.sums = phi_k.transpose(-1, -2) @ self._blocks(pad(v, (0, 1), value=1.0))

    def out(self, mask, alpha):
        """The output with ``mask`` [b, h, rows, key blocks]: probabilities ∝ exp(logit)·mask in the
        sparse branch, φ(q)·φ(k)·(1 - mask) in the linear one. With 0 and 1 this is exactly sparse-
        linear attention. ``alpha(lse, norm)`` mixes the branches."""
        tokens = mask.repeat_interleave(self.block_k, -1)[..., None, : self.keys]
        weights = self.weights * tokens
        tiny = torch.finfo(weights.dtype).tiny
        total = weights.sum(-1, keepdim=True).clamp(min=tiny)
        sparse = self._values(weights) / total
        sums = torch.einsum("bhrj,bhjde->bhrde", 1 - mask, self.sums)
        linear = self.phi_q @ sums
        norm = linear[..., -1:].clamp(min=tiny)
        share = alpha((total.log() + self.top)[..., 0], norm[..., 0])
        share = share.where(norm[..., 0] > tiny, 1.0)  # nothing is left for the linear branch
        return torch.lerp(linear[..., :-1] / norm, sparse, share[..., None])

    def _values(self, weights):
        return torch.einsum("bhrqt,bhtd->bhrqd", weights, self.v)

    def _blocks(self, x):
        return pad(x, (0, 0, 0, -x.shape[2] % self.block_k)).unflatten(2, (-1, self.block_k))
