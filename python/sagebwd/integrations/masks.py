# SPDX-License-Identifier: Apache-2.0
"""Attention masks as documents of a packed batch.

The kernels know causal masks, windows and documents, not arbitrary masks. Most masks that
frameworks build are key padding, or padding of queries and keys, or padding and a causal mask. They
say no more than which tokens of a batch entry belong together, so each entry becomes a document of
its visible queries and keys. :func:`read` finds out; what is left over is refused.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

# Additive masks hide a key by -inf or by a large negative number: -10000 (diffusers, -9984 in
# bfloat16) or the least number of the dtype. Beside it a probability is 0 in float32.
_HIDDEN = -9000.0

_REMEDY = (
    "masks that hide whole keys, or queries and keys, with or without a causal mask are; put "
    "biases and other patterns on another attention"
)


class Visible(NamedTuple):
    """Query i of a batch entry sees its visible keys, up to its own position if causal."""

    keys: Optional[Tensor] = None  # [b, sk] booleans; None: all
    queries: Optional[Tensor] = None  # [b, sq] booleans; None: all
    causal: bool = False
    top_left: bool = False  # which corner a causal mask starts from


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
    found = _decompose(mask, sq, sk)
    if found is None:
        return f"attn_mask of shape {shape} is not supported: {_REMEDY}"
    keys = None if found.keys is None else found.keys.expand(batch, sk)
    queries = None if found.queries is None else found.queries.expand(batch, sq)
    return found._replace(keys=keys, queries=queries)


def _without_repeats(mask):
    """The mask without what expand() repeated."""
    for dim in range(mask.dim() - 1):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    return mask


def _decompose(mask, sq, sk):
    """The Visible of [b or 1, sq or 1, sk or 1] booleans, or None."""
    keys, queries = mask.any(1), mask.any(2)
    if mask.shape[1] == 1 or mask.shape[2] == 1:
        return Visible(_unless_all(keys), _unless_all(queries))
    if torch.equal(mask, queries[:, :, None] & keys[:, None, :]):
        return Visible(_unless_all(keys), _unless_all(queries))
    # A causal mask whose hidden keys are at one end: the others keep their distance to that end.
    for top_left in (True, False):
        causal = torch.ones(sq, sk, dtype=torch.bool, device=mask.device)
        causal = causal.tril(0 if top_left else sk - sq)
        at_one_end = _is_prefix(keys if top_left else keys.flip(1))
        if at_one_end and torch.equal(mask, causal & keys[:, None, :]):
            return Visible(_unless_all(keys), None, True, top_left)
    return None


def _unless_all(flags):
    return None if bool(flags.all()) else flags


def _is_prefix(flags):
    """Whether True comes before False in every row."""
    return bool((flags[:, 1:] <= flags[:, :-1]).all())


class Packing:
    """The visible tokens of a batch in a row, and back. All of it is differentiable."""

    def __init__(self, visible, q, k):
        self.batch, self.sq, self.sk = q.shape[0], q.shape[2], k.shape[2]
        everything = lambda n: torch.ones(self.batch, n, dtype=torch.bool, device=q.device)
        queries = everything(self.sq) if visible.queries is None else visible.queries
        keys = everything(self.sk) if visible.keys is None else visible.keys
        self._where_q, self.cu_q = _places(queries)
        self._where_k, self.cu_k = _places(keys)

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


def _places(flags):
    """Where the True entries of [b, s] are, and the offsets of its rows among them."""
    counts = flags.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return flags.reshape(-1).nonzero().flatten(), torch.nn.functional.pad(counts, (1, 0))


def _pack(t, where):
    """[b, h, s, d] to [tokens, h, d]."""
    return t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]).index_select(0, where)


def _unpack(t, where, batch, length):
    """[tokens, h, d] to [b, h, s, d], 0 where nothing was."""
    whole = t.new_zeros((batch * length, *t.shape[1:])).index_copy(0, where, t)
    return whole.view(batch, length, *t.shape[1:]).transpose(1, 2)
