# SPDX-License-Identifier: Apache-2.0
"""The router: which key blocks each block of queries sees."""

import torch
from torch import nn

from .._ops.mix import block_means
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
        return self.means(q, k, mean_free_keys=True)

    def means(self, q, k, mean_free_keys):
        """Means of blocks, those of k for each query head."""
        group = q.shape[2] // k.shape[2]
        q, k = block_means(
            q.transpose(1, 2), k.transpose(1, 2), self.block_q, self.block_k, mean_free_keys
        )
        return q, k if group == 1 else k.repeat_interleave(group, 1)

    def scores(self, q, k, wq=None, wk=None):
        """[b, h, rows, key blocks] of the means :meth:`pooled`, in float32: 16 bits would tie
        scores, and ties favour early blocks."""
        wq, wk = self.wq if wq is None else wq, self.wk if wk is None else wk
        heads = q.shape[:2]
        q, k = (q @ wq.float()).flatten(0, 1), (k @ wk.float()).flatten(0, 1)
        # One kernel multiplies and scales.
        nothing = q.new_empty(())
        scores = torch.baddbmm(nothing, q, k.transpose(-1, -2), beta=0, alpha=q.shape[-1] ** -0.5)
        # Not unflatten(), which PyTorch 2.11 cannot compile where there is a default device.
        return scores.view(*heads, *scores.shape[1:])

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
