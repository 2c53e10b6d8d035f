# SPDX-License-Identifier: Apache-2.0
"""The router of causal attention: no later token has any part in what a query sees."""

import torch
from torch.nn.functional import pad

from ..block_lists import BlockLists
from .router import Router


class CausalRouter(Router):
    """Chooses among the key blocks that lie before all queries of a block. Those that the diagonal
    touches are always listed, and later ones never.

    The means are of the block of queries *before* and of raw keys: the mean of a block's own
    queries, or of all keys, would tell a query of later tokens.
    """

    def pooled(self, q, k):
        """Row i has the mean of query block i - 1, the first row 0: it has nothing to choose."""
        q, k = self.means(q, k, mean_free_keys=False)
        return pad(q[:, :, :-1], (0, 0, 1, 0)), k

    def choices(self, rows, key_blocks, keep):
        for place, row in enumerate(rows):
            past = row * self.block_q // self.block_k
            yield [place], past, self.entries(keep, past)

    @torch.no_grad()
    def route(self, q, k, keep):
        rows, key_blocks = (-(-q.shape[1] // block) for block in (self.block_q, self.block_k))
        most = (rows - 1) * self.block_q // self.block_k  # to choose between, in the last row
        if rows <= 1 or self.entries(keep, most) == most:
            return None
        row = torch.arange(rows, device=q.device)[:, None]
        past = row * self.block_q // self.block_k
        # The first block that no query of the row sees.
        end = -(-(row + 1) * self.block_q // self.block_k)
        end = end.clamp(max=key_blocks)
        order = self._order(self.scores(*self.pooled(q, k)), past, end)
        taken = self._taken(past, keep)
        # In order: what is later, what the diagonal touches, the past from best to worst.
        later, seen = key_blocks - end, end - past + taken
        diagonal = self._diagonal()
        width = min(diagonal + self.entries(keep, most), key_blocks)
        at = (later + torch.arange(width, device=q.device)).clamp(max=key_blocks - 1)
        index = order.gather(-1, at.expand(*order.shape[:3], -1))
        # The diagonal and the best block before it: one of them has most of nearly every row.
        return (
            self._lists(index, seen, key_blocks, lead=diagonal + 1),
            self._lists(order, later + seen, key_blocks, lead=0),
        )

    def _diagonal(self):
        """The most blocks of keys that a block of queries touches at the diagonal."""
        if self.block_q % self.block_k == 0 or self.block_k % self.block_q == 0:
            return max(1, self.block_q // self.block_k)
        return -(-self.block_q // self.block_k) + 1

    def _taken(self, past, keep):
        """``entries(keep, past)`` on the device, without waiting for it."""
        fixed = sum((past > block for block in self.always), torch.zeros_like(past))
        taken = (past.double() * keep).round().long().clamp(min=1)
        return torch.minimum(torch.maximum(taken, fixed), past)

    def _order(self, scores, past, end):
        """All key blocks of each row: those from ``end`` on, those of the diagonal, fixed ones, and
        the others by their scores."""
        most = torch.finfo(scores.dtype).max
        block = torch.arange(scores.shape[-1], device=scores.device)
        value = scores.nan_to_num(nan=-most).clamp(-most / 4, most / 4)
        for fixed in self.always:
            value = value.masked_fill(block == fixed, most / 2)
        value = value.masked_fill(block >= past, most).masked_fill(block >= end, torch.inf)
        return value.argsort(dim=-1, descending=True, stable=True)

    def _lists(self, index, count, key_blocks, lead):
        count = count[:, 0].to(torch.int32).expand(index.shape[:3]).contiguous()
        return BlockLists(
            index.to(torch.int32),
            count,
            key_blocks=key_blocks,
            block_q=self.block_q,
            block_k=self.block_k,
            lead=lead,
        )
