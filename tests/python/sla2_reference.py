# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention in float64 with every pair of tokens written out, and its gradients by
formula. Shares no code with sagebwd.sla2."""

import math

import torch


def tokens_of(mask, block_q, block_k, s, sk):
    """[b, h, rows, key blocks] → [b, h, s, sk]."""
    return mask.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)[:, :, :s, :sk]


def branches(q, k, v, mask, rest=None):
    """(sparse, L, linear, n) of [b, h, s, d] tensors: P ∝ exp(S)·mask, and φφᵀ·rest. Without
    ``rest`` it is 1 - mask and keys lose their mean; causal attention says what is left, and keeps
    the mean. Where nothing is left, linear and n are 0."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if rest is None:
        k, rest = k - k.mean(2, keepdim=True), 1 - mask
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    top = logits.masked_fill(mask == 0, -math.inf).amax(-1, keepdim=True).detach()
    p = (logits - top).exp().masked_fill(mask == 0, 0.0) * mask
    total = p.sum(-1, keepdim=True)
    weights = (q.softmax(-1) @ k.softmax(-1).transpose(-1, -2)) * rest
    n = weights.sum(-1, keepdim=True)
    linear = weights @ v / n.where(n > 0, 1.0)
    return p @ v / total, (total.log() + top)[..., 0], linear, n[..., 0]


def mask_gradient(q, k, v, mask, alpha, dout, block_q, block_k):
    """dm [b, h, rows, key blocks] by the formula: Σ e^(S - L)(dP - D) - ⟨dH, h⟩ - ⟨dZ, z⟩. All
    float64, one key head per query head; alpha is [b, h, s]."""
    pairs = tokens_of(mask, block_q, block_k, q.shape[2], k.shape[2])
    sparse, lse, linear, n = branches(q, k, v, pairs)
    k = k - k.mean(2, keepdim=True)
    alpha = alpha[..., None]
    d_sparse, d_linear = alpha * dout, (1 - alpha) * dout
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    dp = d_sparse @ v.transpose(-1, -2) - (d_sparse * sparse).sum(-1, keepdim=True)
    pairwise = (logits - lse[..., None]).exp() * dp
    # ⟨dH, h⟩ + ⟨dZ, z⟩, a pair of tokens at a time: w_r·φ(k_t) (dO_l·v_t - D_l).
    w = q.softmax(-1) / n[..., None]
    d_l = d_linear @ v.transpose(-1, -2) - (d_linear * linear).sum(-1, keepdim=True)
    pairwise = pairwise - (w @ k.softmax(-1).transpose(-1, -2)) * d_l
    return blocks_of(pairwise, block_q, block_k)


def blocks_of(x, block_q, block_k):
    """Sums of [b, h, s, sk] over pairs of blocks."""
    x = torch.nn.functional.pad(x, (0, -x.shape[3] % block_k, 0, -x.shape[2] % block_q))
    return x.unflatten(3, (-1, block_k)).unflatten(2, (-1, block_q)).sum((3, 5))


def means_of(x, block):
    """[b, h, blocks, d] of [b, h, s, d]; the last block may be short."""
    return torch.stack([part.mean(2) for part in x.split(block, 2)], 2)
