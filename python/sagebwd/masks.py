# SPDX-License-Identifier: Apache-2.0
"""Attention masks given as tensors, read as what the kernels know: documents, and one causal mask
or sliding window for all of them.

Padding on either side, causal masks, sliding windows, packed documents and any mixture of these can
be read so. A bias, or a pattern of another kind, cannot.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .attention import attention, attention_varlen, check_tensors

_REMEDY = (
    "padding, causal masks, sliding windows and packed documents can be used here; for others use "
    "torch.nn.functional.scaled_dot_product_attention or flex_attention"
)


@dataclass
class Documents:
    """Visible tokens of a batch as documents. Tokens count over the whole batch, b * s of them."""

    index_q: torch.Tensor  # queries that see a key
    index_k: torch.Tensor  # keys that a query sees
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    window: tuple
    top_left: bool
    is_batch: bool  # every row of the batch is one document, whole

    def rows(self, t, index):
        """t [b, h, s, d] as [tokens, h, d], those of index."""
        t = t.transpose(1, 2).flatten(0, 1)
        return t if len(index) == len(t) else t.index_select(0, index)


def attention_with_mask(q, k, v, mask, *, softmax_scale=None, recipe="vectorwise"):
    """(out, lse) of q [b, h, s, d] over the keys that mask shows; it broadcasts to [b, h, s, sk]
    and is bool (True: seen) or a float of 0 and -inf. Queries that see no key give 0. Its values
    are read: on a GPU the call waits for them. On the meta device there are none, only shapes."""
    check_tensors(q, k, v, dims=4)
    b, h, s, d = q.shape
    if k.shape[0] != b:
        raise ValueError(f"q, k, v: expected one batch size, got {b} and {k.shape[0]}")
    if q.device.type == "meta":
        return attention(
            q, k, v, layout="bhsd", softmax_scale=softmax_scale, recipe=recipe, return_lse=True
        )
    documents = documents_of(visible_keys(mask, b, h, s, k.shape[2]))
    options = dict(
        softmax_scale=softmax_scale,
        recipe=recipe,
        window_size=documents.window,
        align="top_left" if documents.top_left else "bottom_right",
        return_lse=True,
    )
    if documents.is_batch:
        return attention(q, k, v, layout="bhsd", **options)
    index_q, index_k = documents.index_q, documents.index_k
    out, lse = attention_varlen(
        documents.rows(q, index_q),
        documents.rows(k, index_k),
        documents.rows(v, index_k),
        documents.cu_q,
        documents.cu_k,
        **options,
    )
    if len(index_q) < b * s:
        out = out.new_zeros(b * s, h, d).index_copy(0, index_q, out)
        lse = lse.new_full((h, b * s), -torch.inf).index_copy(1, index_q, lse)
    return out.view(b, s, h, d).transpose(1, 2), lse.view(h, b, s).transpose(0, 1)


def visible_keys(mask, b, h, s, sk):
    """An attn_mask of scaled_dot_product_attention as bool [b, s, sk]. Raises NotImplementedError
    for a bias and for heads that differ."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask: expected a tensor, got {type(mask).__name__}")
    if mask.device.type == "meta":
        raise ValueError("attn_mask: expected a tensor with values, got one on the meta device")
    try:
        mask = mask.expand(b, h, s, sk)
    except RuntimeError:
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to {(b, h, s, sk)}, got "
            f"{tuple(mask.shape)}"
        ) from None
    first = mask[:, 0] if h > 0 else mask.new_zeros(b, s, sk)
    if mask.stride(1) != 0 and not (mask == first[:, None]).all():
        raise NotImplementedError(f"attn_mask: it differs between heads; {_REMEDY}")
    if first.dtype == torch.bool:
        return first
    if not first.is_floating_point():
        raise TypeError(f"attn_mask: expected bool or a float, got {first.dtype}")
    # Libraries hide keys by -inf or by the lowest number. The same to softmax, but in a row of
    # nothing else.
    hidden = first <= torch.finfo(first.dtype).min
    if not (hidden | (first == 0)).all():
        raise NotImplementedError(f"attn_mask: it holds a bias, not only 0 and -inf; {_REMEDY}")
    if (hidden.all(-1) & (first > -torch.inf).any(-1)).any():
        raise NotImplementedError(
            "attn_mask: a row holds the lowest number only, which hides no key from it; use -inf, "
            "or a bool mask"
        )
    return ~hidden


def documents_of(visible):
    """The :class:`Documents` of a bool mask [b, s, sk]. Raises NotImplementedError where there are
    none."""
    b, s, sk = visible.shape
    seen_q, seen_k = visible.any(2), visible.any(1)
    # Keys in the order of the whole batch, without those that nobody sees.
    number = (seen_k.flatten().cumsum(0) - 1).view(b, sk)
    index_q = torch.nonzero(seen_q.flatten()).flatten()
    rows = visible.flatten(0, 1).index_select(0, index_q).int()
    numbers = number.repeat_interleave(s, 0).index_select(0, index_q)
    pick = lambda at: numbers.gather(1, at[:, None])[:, 0]
    if len(index_q) == 0:
        first = last = index_q
    else:
        first, last = pick(rows.argmax(1)), pick(sk - 1 - rows.flip(1).argmax(1))
    if not (rows.sum(1) == last - first + 1).all():
        raise NotImplementedError(f"attn_mask: a query sees keys with gaps between them; {_REMEDY}")

    # A document starts where all keys seen so far lie before all keys seen from here on.
    before, after = first, first
    if len(index_q) > 0:
        before, after = last.cummax(0).values, first.flip(0).cummin(0).values.flip(0)
    before = F.pad(before, (1, 0), value=-1)
    starts = torch.nonzero(after > before[:-1]).flatten()
    end = lambda starts, n: F.pad(starts, (0, 1), value=n)
    cu_q, cu_k = end(starts, len(index_q)), end(before[starts] + 1, int(seen_k.sum()))
    length_q, length_k = cu_q.diff(), cu_k.diff()
    own = lambda x: x.repeat_interleave(length_q)
    i = torch.arange(len(index_q), device=visible.device) - own(cu_q[:-1])
    first, last, n = first - own(cu_k[:-1]), last - own(cu_k[:-1]), own(length_k)
    for top_left in (False, True):
        at = i if top_left else i + n - own(length_q)
        left = _side(at - first, first > 0, at)
        right = _side(last - at, last < n - 1, n - 1 - at)
        if left is not None and right is not None:
            break
    else:
        raise NotImplementedError(
            f"attn_mask: neither a causal mask nor a window fits it; {_REMEDY}"
        )
    whole = len(index_q) == b * s and bool(seen_k.all())
    offsets = (t.to(torch.int32) for t in (cu_q, cu_k))
    return Documents(
        index_q,
        torch.nonzero(seen_k.flatten()).flatten(),
        *offsets,
        (left, right),
        top_left,
        whole and len(starts) == b,
    )


def _side(reach, ends, least):
    """The one number of keys that every query sees to a side: reach where the window ends, at least
    ``least`` where the sequence does. -1 for an open side, None where there is no such number."""
    if not ends.any():
        return -1
    size = int(reach[ends][0])
    fits = size >= 0 and bool((reach[ends] == size).all()) and bool((least[~ends] <= size).all())
    return size if fits else None
