# SPDX-License-Identifier: Apache-2.0
"""Block lists: which blocks of keys each block of queries sees (block-sparse attention)."""

import math

import torch

from . import arguments
from ._ops import mix


class BlockLists:
    """For each block of ``block_q`` queries, the blocks of ``block_k`` keys that it sees, best
    first.

    index
        int32 [batch, heads, rows, width]: row r lists key blocks of queries ``r * block_q`` and
        following. Batch and heads may be 1 or left out: then all share the lists. Heads are those
        of q. Packed batches have the rows of all documents, one document after the other, and
        blocks count from the first token of a document.
    count
        int32 [batch, heads, rows]: how many entries of each row are in use; None: all.
    key_blocks
        Blocks of keys that can be listed; for packed batches those of the longest document.
    lead
        Leading entries of each row whose P is not quantised; -1: all. With few blocks one key often
        has most of a row, and INT8 would lose the others of its block. So the best comes first.

    Block sizes are multiples of 64. The mask of a call acts inside listed blocks. A query whose row
    lists nothing, or nothing that the mask leaves, gives 0. Entries on the CPU are checked by the
    call: each must be in range and stand in its row once.
    """

    def __init__(self, index, count=None, *, key_blocks, block_q=128, block_k=64, lead=1):
        self.index = _lists("index", index, 4)
        self.count = None if count is None else _lists("count", count, 3)
        if self.count is not None and (
            self.count.shape != self.index.shape[:3] or self.count.device != self.index.device
        ):
            raise ValueError(
                f"count: expected shape {tuple(self.index.shape[:3])} on {self.index.device}, got "
                f"{tuple(self.count.shape)} on {self.count.device}"
            )
        self.block_q = _block("block_q", block_q)
        self.block_k = _block("block_k", block_k)
        self.key_blocks = arguments.integer("key_blocks", key_blocks, 0, 2**31 - 1, "a count")
        self.lead = arguments.integer("lead", lead, -1, 2**31 - 1, "-1 (all) or a count")

    @classmethod
    def top_k(cls, scores, keep=None, *, k=None, always=(), block_q=128, block_k=64, lead=1):
        """The key blocks with the largest scores.

        scores is [batch, heads, rows, key blocks] (batch and heads may be 1 or left out), one
        number for each pair of blocks. Each row lists ``k`` of them, or the share ``keep``, in the
        order of their scores. Blocks with the score -inf are not listed. Those of ``always`` are,
        whatever their score. No gradient flows into the scores.
        """
        scores = _floating("scores", scores)
        key_blocks = scores.shape[-1]
        k = _entries(keep, k, key_blocks)
        fixed = _always(always, key_blocks, k)
        if fixed or key_blocks > mix.MOST_COLUMNS:
            index, count = _largest(scores, k, fixed)
        else:
            index, count = mix.top_k(scores.float(), k)
        return cls(
            index,
            count,
            key_blocks=key_blocks,
            block_q=block_q,
            block_k=block_k,
            lead=lead,
        )

    @classmethod
    def from_mask(cls, mask, *, block_q=128, block_k=64, lead=1):
        """Lists of the true entries of a bool tensor [batch, heads, rows, key blocks] (batch and
        heads may be 1 or left out), in increasing order. With ``lead=1`` the first of them is taken
        for the best; give :meth:`top_k` scores if you have any."""
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask: expected a bool tensor, got {_kind(mask)}")
        mask = _four("mask", mask)
        count = mask.sum(-1, dtype=torch.int32)
        index = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        if mask.device.type == "cpu" and not torch.compiler.is_compiling():
            index = index[..., : int(count.max()) if count.numel() else 0]
        return cls(
            index.to(torch.int32),
            count,
            key_blocks=mask.shape[-1],
            block_q=block_q,
            block_k=block_k,
            lead=lead,
        )

    @classmethod
    def from_csr(cls, offset, index, *, key_blocks, block_q=128, block_k=64, lead=1):
        """Lists of any length: row r of a head is ``index[offset[r]:offset[r + 1]]``. index is
        one-dimensional, offset is [batch, heads, rows + 1] (batch and heads may be 1 or left out).
        All rows get as many places as the longest has entries."""
        for name, t in (("offset", offset), ("index", index)):
            if not isinstance(t, torch.Tensor) or t.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: expected a tensor of integers, got {_kind(t)}")
        if index.dim() != 1 or offset.dim() < 1 or offset.shape[-1] < 1:
            raise ValueError(
                "offset, index: expected offsets [batch, heads, rows + 1] and one dimension of "
                f"entries, got shapes {tuple(offset.shape)} and {tuple(index.shape)}"
            )
        start, count = offset[..., :-1], offset.diff(dim=-1)
        if count.numel() and (count.min() < 0 or offset.min() < 0 or offset.max() > len(index)):
            raise ValueError(
                f"offset: expected offsets from 0 to {len(index)} that do not fall, got {offset}"
            )
        width = int(count.max()) if count.numel() else 0
        place = torch.arange(width, device=index.device)
        at = torch.where(place < count[..., None], start[..., None] + place, 0)
        return cls(
            index[at].to(torch.int32),
            count.to(torch.int32),
            key_blocks=key_blocks,
            block_q=block_q,
            block_k=block_k,
            lead=lead,
        )

    def to_mask(self):
        """A bool tensor [batch, heads, rows, key blocks]: true where a block is listed."""
        index = self.index.long()
        if self.count is not None:
            place = torch.arange(index.shape[-1], device=index.device)
            index = torch.where(place < self.count[..., None], index, self.key_blocks)
        mask = torch.zeros(
            *index.shape[:3], self.key_blocks + 1, dtype=torch.bool, device=index.device
        )
        return mask.scatter_(-1, index, True)[..., :-1]

    def transposed(self):
        """The lists seen from the keys: rows are key blocks, entries the query blocks that list
        them, in increasing order."""
        return BlockLists.from_mask(
            self.to_mask().transpose(-1, -2),
            block_q=self.block_k,
            block_k=self.block_q,
            lead=self.lead,
        )

    def sparsity(self):
        """The share of pairs of blocks that is not listed, as a float."""
        pairs = math.prod(self.index.shape[:3]) * self.key_blocks
        listed = self.index.numel() if self.count is None else int(self.count.sum())
        return 1.0 - listed / pairs if pairs else 0.0

    def to(self, device):
        """The same lists on another device."""
        return BlockLists(
            self.index.to(device),
            None if self.count is None else self.count.to(device),
            key_blocks=self.key_blocks,
            block_q=self.block_q,
            block_k=self.block_k,
            lead=self.lead,
        )

    def __repr__(self):
        return (
            f"BlockLists({tuple(self.index.shape)} of {self.key_blocks} key blocks, "
            f"block_q={self.block_q}, block_k={self.block_k}, lead={self.lead}, "
            f"device={self.index.device})"
        )


def check(blocks, q, k, packed, name="blocks"):
    """Raises unless the lists, the argument of this name, fit a call: q and k are [b, h, n, d], or
    packed [t, h, d]."""
    if not isinstance(blocks, BlockLists):
        raise TypeError(f"{name}: expected sagebwd.BlockLists or None, got {_kind(blocks)}")
    batch, heads, rows = blocks.index.shape[:3]
    wanted = 1 if packed else q.shape[0]
    if batch not in (1, wanted) or heads not in (1, q.shape[1]):
        raise ValueError(
            f"{name}: expected lists of 1 or {wanted} batch entries and 1 or {q.shape[1]} heads "
            f"(those of q), got {batch} and {heads}"
        )
    if blocks.index.device != q.device:
        raise ValueError(
            f"{name}: expected q's device {q.device}, got {blocks.index.device}; use "
            f"{name}.to(q.device)"
        )
    if packed:
        return
    for what, got, tokens, size in (
        ("rows", rows, q.shape[2], blocks.block_q),
        ("key_blocks", blocks.key_blocks, k.shape[2], blocks.block_k),
    ):
        if got != (tokens + size - 1) // size:
            raise ValueError(
                f"{name}: expected {(tokens + size - 1) // size} {what}, one for every {size} of "
                f"{tokens} tokens, got {got}"
            )


def _kind(value):
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return type(value).__name__


def _four(name, t, dims=4):
    if t.dim() < dims - 2 or t.dim() > dims:
        raise ValueError(
            f"{name}: expected {dims} dimensions, or fewer without batch or heads, got shape "
            f"{tuple(t.shape)}"
        )
    while t.dim() < dims:
        t = t.unsqueeze(0)
    return t


def _lists(name, t, dims):
    if not isinstance(t, torch.Tensor) or t.dtype != torch.int32:
        raise TypeError(f"{name}: expected an int32 tensor (.int() makes it one), got {_kind(t)}")
    return _four(name, t, dims)


def _floating(name, t):
    if not isinstance(t, torch.Tensor) or not t.is_floating_point():
        raise TypeError(f"{name}: expected a tensor of floating-point numbers, got {_kind(t)}")
    t = _four(name, t.detach())
    if t.device.type == "cpu" and not torch.compiler.is_compiling() and bool(t.isnan().any()):
        raise ValueError(f"{name}: expected numbers, got NaN")
    return t


def _block(name, value):
    value = arguments.integer(name, value, 64, 2**30, "a multiple of 64")
    if value % 64 != 0:
        raise ValueError(f"{name}: expected a multiple of 64, got {value}")
    return value


def _entries(keep, k, key_blocks):
    """Entries of a row."""
    if (keep is None) == (k is None):
        raise TypeError("keep, k: expected one of them")
    if k is not None:
        return arguments.integer("k", k, 0, key_blocks, f"0 to {key_blocks} key blocks")
    if isinstance(keep, (bool, str)) or not 0 < keep <= 1:
        raise ValueError(f"keep: expected a share above 0 and up to 1, got {keep!r}")
    if keep * key_blocks < 1 - 1e-9:
        raise ValueError(
            f"keep: expected at least one of {key_blocks} key blocks, got a share of {keep}; "
            "k=1 lists one whatever the length"
        )
    return min(round(keep * key_blocks), key_blocks)


def _largest(scores, k, fixed):
    """(index, count) of :meth:`BlockLists.top_k`, by PyTorch."""
    chosen = scores
    if fixed:
        chosen = scores.clone()
        for first, last in _runs(fixed):  # with a list of indices the host would wait
            chosen[..., first : last + 1] = math.inf
    values, index = chosen.topk(k, dim=-1)
    listed = values > -math.inf
    if fixed:
        # Blocks of `always` take their place among the others; what is not listed comes last.
        lowest = torch.finfo(scores.dtype).min
        order = scores.gather(-1, index).clamp(min=lowest).masked_fill(~listed, -math.inf)
        index = index.gather(-1, order.argsort(dim=-1, descending=True, stable=True))
    return index.to(torch.int32), listed.sum(-1, dtype=torch.int32)


def _runs(blocks):
    """[(first, last)] of neighbours in sorted numbers."""
    runs = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
    return runs


def _always(always, key_blocks, k):
    wanted = f"key blocks from 0 to {key_blocks - 1}"
    fixed = sorted({arguments.integer("always", i, 0, key_blocks - 1, wanted) for i in always})
    if len(fixed) > k:
        raise ValueError(f"always: expected at most the {k} entries of a list, got {len(fixed)}")
    return fixed
