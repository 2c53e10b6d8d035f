# SPDX-License-Identifier: Apache-2.0
"""Attention masks as documents of a packed batch.

The kernels know causal masks, windows and documents, not arbitrary masks. But queries that see the
same keys can be a document of those keys: padding of keys, or of queries and keys, makes one
document of a batch entry, block-diagonal masks make several. :func:`read` finds them, and causal
masks with padding at one end; what is left over is refused.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Additive masks hide a key by -inf or by a large negative number: -10000 (diffusers, -9984 in
# bfloat16) or the least number of the dtype. Beside it a probability is 0 in float32.
_HIDDEN = -9000.0

# Documents may share keys, each with a copy of its own. More than so many copies are too many.
_COPIES = 4

_REMEDY = (
    "masks that say which tokens belong together (padding, blocks), or causal ones with padding at "
    "one end, are; leave others to another attention"
)


class Visible(NamedTuple):
    """Query i of an entry sees the keys of its document, if causal up to a diagonal."""

    document: Tensor  # [b, sq]: which document a query belongs to
    keys: Tensor  # [documents, sk] booleans
    entry: Tensor  # [documents]: which batch entry a document is of
    causal: bool = False
    top_left: bool = False  # which corner a causal mask starts from

    def is_all(self):
        return len(self.keys) == len(self.document) and bool(self.keys.all())


def unreadable(mask):
    """Why a mask cannot be read, as far as that shows without its numbers; else None."""
    if mask.requires_grad:
        return f"attn_mask that requires a gradient (a learned bias) is not supported: {_REMEDY}"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"attn_mask of {mask.dtype} is not supported: give booleans, True where a key counts"
    if mask.dim() > 4:
        shape = tuple(mask.shape)
        return f"attn_mask of shape {shape} is not supported: give [b, 1, queries, keys]"
    return None


def read(mask, batch, sq, sk):
    """The :class:`Visible` of a mask that broadcasts to [b, h, sq, sk], or the reason (a string)
    why it has none. Looks at the numbers, so that a GPU is waited for."""
    shape = tuple(mask.shape)
    reason = unreadable(mask)
    if reason is not None:
        return reason
    if mask.numel() == 0:
        return f"attn_mask of shape {shape} is not supported: leave out empty masks"
    mask = _without_repeats(mask.detach()[(None,) * (4 - mask.dim())])
    if mask.shape[1] != 1:
        mask, heads = mask[:, :1], mask
        if not torch.equal(heads, mask.expand_as(heads)):
            return f"attn_mask of shape {shape} differs between heads, not supported: {_REMEDY}"
    mask = mask[:, 0]
    if mask.dtype != torch.bool:
        hidden = mask <= _HIDDEN
        if not (hidden | (mask == 0)).all():
            return f"attn_mask of shape {shape} with additive biases is not supported: {_REMEDY}"
        # Where all keys of a query are hidden by the same finite number, softmax sees none of them
        # as hidden.
        if not torch.isinf(mask[hidden]).all() and hidden.all(-1).any():
            return (
                f"attn_mask of shape {shape} that hides all keys of a query by a finite number is "
                "not supported: use booleans or -inf"
            )
        mask = ~hidden
    for kind in (_pairs, _causal, _grouped):  # the last one takes longest
        visible = kind(mask, batch, sq, sk)
        if visible is not None:
            return visible
    return f"attn_mask of shape {shape} is not supported: {_REMEDY}"


def _without_repeats(mask):
    """The mask without what expand() repeated."""
    for dim in range(mask.dim() - 1):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    return mask


def _pairs(mask, batch, sq, sk):
    """The Visible of [b or 1, sq or 1, sk or 1] booleans that hide keys, or queries, or both; None
    for others."""
    keys, queries = mask.any(1), mask.any(2)
    if not torch.equal(mask, queries[:, :, None] & keys[:, None, :]):
        return None
    keys, queries = keys.expand(batch, sk), queries.expand(batch, sq)
    entry = torch.arange(batch, device=mask.device)
    if queries.all():
        return Visible(entry[:, None].expand(batch, sq), keys, entry)
    # A second document of every entry, without keys, takes the hidden queries.
    keys = torch.stack([keys, torch.zeros_like(keys)], 1).reshape(2 * batch, sk)
    return Visible(2 * entry[:, None] + ~queries, keys, entry.repeat_interleave(2))


def _grouped(mask, batch, sq, sk):
    """The Visible of [b or 1, sq or 1, sk or 1] booleans, queries with equal rows in a document;
    None if those are too many."""
    entries, rows, _ = mask.shape
    mask = mask.expand(entries, rows, sk)
    # Rows are equal if their sums of random integers are, but for a chance that the check below
    # excludes. The sums are exact, so that equal rows have equal ones.
    fixed = torch.Generator("cpu").manual_seed(0)
    weights = torch.randint(2**36, (sk,), generator=fixed, device="cpu").double().to(mask.device)
    sums = torch.stack([rows_of_entry.double() @ weights for rows_of_entry in mask])
    _, kind = torch.unique(sums, return_inverse=True)
    kind = kind + torch.arange(entries, device=mask.device)[:, None] * (kind.max() + 1)
    _, document = torch.unique(kind, return_inverse=True)  # in the order of entries
    count = int(document.max()) + 1
    first = document.new_full((count,), entries * rows).scatter_reduce(
        0, document.flatten(), torch.arange(entries * rows, device=mask.device), "amin"
    )
    keys = mask.reshape(-1, sk)[first]
    if keys.sum() > _COPIES * entries * sk or not torch.equal(keys[document], mask):
        return None
    entry, document = first // rows, document.expand(entries, sq)
    if entries < batch:
        entry = torch.arange(batch, device=mask.device).repeat_interleave(count)
        document = document + count * torch.arange(batch, device=mask.device)[:, None]
        keys = keys.repeat(batch, 1)
    return Visible(document, keys, entry)


def _causal(mask, batch, sq, sk):
    """The Visible of a causal mask whose hidden keys are at one end: the others keep their distance
    to the other one. None for other masks."""
    if mask.shape[1] != sq or mask.shape[2] != sk:
        return None
    keys = mask.any(1)
    for top_left in (True, False):
        causal = torch.ones(sq, sk, dtype=torch.bool, device=mask.device)
        causal = causal.tril(0 if top_left else sk - sq)
        at_one_end = _is_prefix(keys if top_left else keys.flip(1))
        if at_one_end and torch.equal(mask, causal & keys[:, None, :]):
            entry = torch.arange(batch, device=mask.device)
            return Visible(
                entry[:, None].expand(batch, sq), keys.expand(batch, sk), entry, True, top_left
            )
    return None


def _is_prefix(flags):
    """Whether True comes before False in every row."""
    return bool((flags[:, 1:] <= flags[:, :-1]).all())


class Packing:
    """The visible tokens of a batch, document by document, and back. All of it is
    differentiable."""

    def __init__(self, visible):
        self.batch, self.sq = visible.document.shape
        self.sk = visible.keys.shape[1]
        document, (of_key, key) = visible.document.flatten(), visible.keys.nonzero(as_tuple=True)
        counts = torch.bincount(document, minlength=len(visible.keys))
        sees = visible.keys.any(1)
        order = torch.argsort(document, stable=True)
        self._where_q = order[sees[document[order]]]
        self._where_k = visible.entry[of_key] * self.sk + key
        self.cu_q, self.cu_k = _offsets(counts * sees), _offsets(visible.keys.sum(1))

    def options(self, options):
        return options._replace(cu_seqlens_q=self.cu_q, cu_seqlens_k=self.cu_k)

    def queries(self, *tensors):
        return tuple(_pack(t, self._where_q) for t in tensors)

    def keys(self, *tensors):
        return tuple(_pack(t, self._where_k) for t in tensors)

    def rows(self, t):
        """[b, h, s] to [h, tokens]."""
        flat = t.transpose(0, 1).reshape(t.shape[1], -1)
        return flat.index_select(1, self._where_q).contiguous()

    def unpack_queries(self, t):
        return _unpack(t, self._where_q, self.batch, self.sq)

    def unpack_keys(self, t):
        return _unpack(t, self._where_k, self.batch, self.sk)

    def unpack_rows(self, t):
        whole = t.new_full((t.shape[0], self.batch * self.sq), -torch.inf)
        whole = whole.index_copy(1, self._where_q, t)
        return whole.view(t.shape[0], self.batch, self.sq).transpose(0, 1)


def _offsets(counts):
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def _pack(t, where):
    """[b, h, s, d] to [tokens, h, d]."""
    return t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]).index_select(0, where)


def _unpack(t, where, batch, length):
    """[tokens, h, d] to [b, h, s, d], 0 where nothing was, the sum of copies."""
    whole = t.new_zeros((batch * length, *t.shape[1:])).index_add(0, where, t)
    return whole.view(batch, length, *t.shape[1:]).transpose(1, 2)
