# SPDX-License-Identifier: Apache-2.0
"""The router: which key blocks each block of queries sees."""

import torch
from torch import nn

from ..block_lists import BlockLists


class Router(nn.Module):
    """Scores x = (mean of q · Wq) · (mean of k · Wk) / sqrt(d) for each pair of blocks.

    Wq and Wk are [heads, d, d] and start as the identity, which is the rule "compare the means".
    They are trained by :func:`sagebwd.sla2.fit`. Choosing blocks has no gradient, so later training
    leaves them as they are, and they do not ask for gradients.
    """

    def __init__(self, heads, head_dim, block_q, block_k, always=(), device=None, dtype=None):
        super().__init__()
        eye = torch.eye(head_dim, device=device, dtype=dtype).expand(heads, -1, -1)
        self.wq = nn.Parameter(eye.clone(), requires_grad=False)
        self.wk = nn.Parameter(eye.clone(), requires_grad=False)
        self.block_q, self.block_k = block_q, block_k
        self.always = tuple(sorted(set(always)))

    def entries(self, keep, key_blocks):
        """How many key blocks a row lists."""
        fixed = sum(1 for block in self.always if block < key_blocks)
        return min(max(1, round(keep * key_blocks), fixed), key_blocks)

    def pooled(self, q, k):
        """Means of blocks in float32, heads first: [b, h, rows, d] and [b, h, key blocks, d]. Those
        of k are without the mean of the sequence, which moves all scores of a row alike."""
        group, tokens = q.shape[2] // k.shape[2], k.shape[1]
        sums = block_sums(k, self.block_k)
        k = sums / block_sizes(k, self.block_k) - sums.sum(2, keepdim=True) / tokens
        return block_sums(q, self.block_q) / block_sizes(q, self.block_q), heads_of(k, group)

    def scores(self, q, k, wq=None, wk=None):
        """[b, h, rows, key blocks] of the means :meth:`pooled`, in float32: 16 bits would tie
        scores, and ties favour early blocks."""
        wq, wk = self.wq if wq is None else wq, self.wk if wk is None else wk
        return (q @ wq.float()) @ (k @ wk.float()).transpose(-1, -2) / q.shape[-1] ** 0.5

    def choices(self, rows, key_blocks, keep):
        """Between how many blocks some rows choose, from the first on, and how many they take:
        (places in ``rows``, blocks, entries) for rows that are alike."""
        yield list(range(len(rows))), key_blocks, self.entries(keep, key_blocks)

    def lists(self, q, k, keep):
        """The :class:`sagebwd.BlockLists` of q [b, s, h, d] and k; None if they would list all."""
        found = self.route(q, k, keep)
        return None if found is None else found[0]

    @torch.no_grad()
    def route(self, q, k, keep):
        """(lists of the sparse branch, lists of what the linear branch leaves out), or None if
        nothing would be left for the linear branch."""
        key_blocks = -(-k.shape[1] // self.block_k)
        entries = self.entries(keep, key_blocks)
        if entries == key_blocks or q.shape[1] == 0:
            return None
        scores = self.scores(*self.pooled(q, k))
        # Of a short sequence, a block that is not there is not listed.
        always = [block for block in self.always if block < scores.shape[-1]]
        lists = BlockLists.top_k(
            scores, k=entries, always=always, block_q=self.block_q, block_k=self.block_k
        )
        return lists, lists

    def extra_repr(self):
        heads, head_dim = self.wq.shape[:2]
        return (
            f"{heads} heads of {head_dim}, blocks {self.block_q}x{self.block_k}, "
            f"always={self.always}"
        )


def block_sums(x, block):
    """[b, h, blocks, d] in float32 of x [b, s, h, d], read once and in place; the last block may be
    short."""
    tokens = x.shape[1]
    whole = tokens // block * block
    sums = x[:, :whole].unflatten(1, (-1, block)).sum(2, dtype=torch.float32)
    if whole < tokens:
        sums = torch.cat((sums, x[:, whole:].sum(1, keepdim=True, dtype=torch.float32)), 1)
    return sums.transpose(1, 2)


def block_sizes(x, block):
    """Tokens of a block, or [blocks, 1] if the last is short."""
    tokens = x.shape[1]
    if tokens % block == 0:
        return block
    first = torch.arange(0, tokens, block, device=x.device)
    return (tokens - first).clamp(max=block)[:, None]


def heads_of(x, group):
    """x [b, hk, ...] of key heads, for each query head."""
    return x if group == 1 else x.repeat_interleave(group, 1)
