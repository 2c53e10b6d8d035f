# SPDX-License-Identifier: Apache-2.0
"""The linear branch made of PyTorch's own matmuls, for what no kernel of ours serves on a GPU
(linear.py says when).

Key blocks give h_j = φ(K_j)ᵀ·[V_j, 1]. A block of queries sums them over the blocks that it does
not exclude: H = (1 - M)·h, a product with a 0/1 matrix, in which nothing cancels. The last column
of H gives the norm. The backward makes h and H again and goes the same way back.
"""

import functools

import torch
from torch.nn.functional import pad

#: Numbers in the block sums of the heads that are worked on at once: 256 MB of float32.
_MOST_SUMS = 2**26


def _without_autocast(function):
    """Products stay in float32 under autocast, which would make bfloat16 of them."""

    @functools.wraps(function)
    def run(first, *rest):
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *rest)

    return run


@_without_autocast
def forward(q, k, v, index, count, block_q, block_k, mean_free_keys):
    """(out, norm) of q [b, h, n, d] and k, v [b, hk, nk, d]."""
    out = torch.zeros_like(q)
    norm = q.new_zeros(q.shape[:3], dtype=torch.float32)
    for b, heads, kv_heads in _chunks(q, k, block_q, block_k):
        part = _Part(
            *(q[b, heads], k[b, kv_heads], v[b, kv_heads]),
            _seen(index, count, q, k, b, heads, block_q, block_k),
            *(block_q, block_k, mean_free_keys),
        )
        out[b, heads] = part.out().to(q.dtype)
        norm[b, heads] = part.norm()
    return out, norm


@_without_autocast
def backward(dout, dnorm, q, k, v, index, count, block_q, block_k, mean_free_keys):
    """(dq, dk, dv); dnorm may be None."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for b, heads, kv_heads in _chunks(q, k, block_q, block_k):
        part = _Part(
            *(q[b, heads], k[b, kv_heads], v[b, kv_heads]),
            _seen(index, count, q, k, b, heads, block_q, block_k),
            *(block_q, block_k, mean_free_keys),
        )
        results = part.gradients(dout[b, heads], None if dnorm is None else dnorm[b, heads])
        for whole, here, result in zip((dq, dk, dv), (heads, kv_heads, kv_heads), results):
            whole[b, here] = result.to(whole.dtype)
    return dq, dk, dv


def _chunks(q, k, block_q, block_k):
    """(batch entry, query heads, key heads), so many at once that their sums fit into memory. None
    where there is nothing to sum."""
    if q.numel() == 0 or k.numel() == 0:
        return
    group, d = q.shape[1] // k.shape[1], q.shape[3]
    blocks = group * _blocks(q.shape[2], block_q) + _blocks(k.shape[2], block_k)
    step = max(1, _MOST_SUMS // (blocks * d * (d + 1)))
    for b in range(q.shape[0]):
        for first in range(0, k.shape[1], step):
            last = min(first + step, k.shape[1])
            yield b, slice(first * group, last * group), slice(first, last)


def _blocks(tokens, size):
    return (tokens + size - 1) // size


def _seen(index, count, q, k, b, heads, block_q, block_k):
    """float [heads, rows, key blocks] of a chunk: 1 where a block is not excluded."""
    rows, key_blocks = _blocks(q.shape[2], block_q), _blocks(k.shape[2], block_k)
    if index is None:
        return q.new_ones((heads.stop - heads.start, rows, key_blocks), dtype=torch.float32)
    at = min(b, index.shape[0] - 1), heads if index.shape[1] > 1 else slice(0, 1)
    entries = index[at].long()
    # Entries that count for nothing go to a column after the others.
    used = (entries >= 0) & (entries < key_blocks)
    if count is not None:
        used &= torch.arange(entries.shape[-1], device=q.device) < count[at][..., None]
    seen = q.new_ones((*entries.shape[:2], key_blocks + 1), dtype=torch.float32)
    seen.scatter_(-1, entries.where(used, key_blocks), 0.0)
    return seen[..., :-1].expand(heads.stop - heads.start, -1, -1)


class _Part:
    """Some heads of one batch entry: q [h, n, d], k and v [hk, nk, d], seen [h, rows, blocks]."""

    def __init__(self, q, k, v, seen, block_q, block_k, mean_free_keys):
        self.heads, self.kv_heads = q.shape[0], k.shape[0]
        self.queries, self.keys = q.shape[1], k.shape[1]
        self.block_q, self.mean_free_keys = block_q, mean_free_keys
        self.seen = seen.reshape(self.kv_heads, -1, seen.shape[-1])  # [hk, group·rows, blocks]
        k = k.float()
        if mean_free_keys:
            k = k - k.mean(1, keepdim=True)
        self.phi_q = self._cut(q.float().softmax(-1), block_q).reshape(
            *self.seen.shape[:2], block_q, q.shape[-1]
        )
        self.phi_k = self._cut(k.softmax(-1), block_k)
        self.v = self._cut(pad(v.float(), (0, 1), value=1.0), block_k)  # [V, 1]
        h = self.phi_k.transpose(-1, -2) @ self.v
        self.sums = (self.seen @ h.flatten(2)).unflatten(-1, h.shape[2:])  # H
        result = self.phi_q @ self.sums
        norm = result[..., -1:]
        # Without keys, or with features that float32 cannot hold, there is nothing to divide by.
        self.nothing = norm < torch.finfo(norm.dtype).tiny
        self.norms = norm.masked_fill(self.nothing, 0.0)
        self.inverse = (1.0 / norm).masked_fill(self.nothing, 0.0)
        self.results = result[..., :-1] * self.inverse

    @staticmethod
    def _cut(x, block):
        """[heads, blocks, block, channels], zeros after the last token."""
        return pad(x, (0, 0, 0, -x.shape[1] % block)).unflatten(1, (-1, block))

    def _queries(self, x):
        """A result of the queries as [h, n, channels]."""
        return x.reshape(self.heads, -1, x.shape[-1])[:, : self.queries]

    def out(self):
        return self._queries(self.results)

    def norm(self):
        return self._queries(self.norms)[..., 0]

    def gradients(self, dout, dnorm):
        dout = self._cut(dout.float(), self.block_q).reshape(self.results.shape)
        last = -(dout * self.results).sum(-1, keepdim=True) * self.inverse
        if dnorm is not None:
            last = last + self._cut(dnorm.float()[..., None], self.block_q).reshape(last.shape)
        grad = torch.cat((dout * self.inverse, last), -1).masked_fill(self.nothing, 0.0)
        dq = _through_softmax(self.phi_q, grad @ self.sums.transpose(-1, -2))
        dsums = self.phi_q.transpose(-1, -2) @ grad
        dh = (self.seen.transpose(-1, -2) @ dsums.flatten(2)).unflatten(-1, dsums.shape[2:])
        dk = _through_softmax(self.phi_k, self.v @ dh.transpose(-1, -2)).flatten(1, 2)
        dv = (self.phi_k @ dh[..., :-1]).flatten(1, 2)
        dk, dv = dk[:, : self.keys], dv[:, : self.keys]
        if self.mean_free_keys:
            dk = dk - dk.mean(1, keepdim=True)
        return self._queries(dq), dk, dv


def _through_softmax(phi, dphi):
    return phi * (dphi - (phi * dphi).sum(-1, keepdim=True))
