# SPDX-License-Identifier: Apache-2.0
"""Translates mask tensors into what the kernels know: documents, and one causal mask or sliding
window for all of them.

This works for padding of keys and of queries, causal masks, windows, packed documents and most
mixtures of these. Where nothing else fits, queries that see the same keys become a document; keys
that several documents share are copied. :func:`read` finds the documents of a mask, and refuses the
mask if there are none. :func:`forward` and :func:`backward` run attention over the documents.
"""

import sys
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import padding
from .call import dense
from .recipe import as_recipe

# Additive masks hide a key by -inf or by a large negative number: -10000 (-9984 in bfloat16) or the
# lowest number of the dtype. Beside it a probability is 0 in float32.
_HIDDEN = -9000.0

# Documents that share keys have copies of them. A mask is refused if it needs more than this many
# copies of all keys.
_COPIES = 4

_REMEDY = (
    "padding, causal masks, sliding windows, documents, and few sets of queries that see the "
    "same keys can be used; leave other masks to another attention, such as flex_attention"
)


class Documents(NamedTuple):
    """The visible tokens of a batch, document by document. Tokens are numbered over the whole
    batch. Packing and unpacking are differentiable."""

    batch: int
    queries: int
    keys: int
    where_q: Optional[Tensor] = None  # tokens that see a key; None: all of them, in order
    where_k: Optional[Tensor] = None  # tokens that are seen, maybe several times
    cu_q: Optional[Tensor] = None  # None: every entry of the batch is one document
    cu_k: Optional[Tensor] = None
    causal: bool = False
    top_left: bool = False
    window: tuple = (-1, -1)

    def options(self, options):
        """The operator's options for this mask."""
        return options._replace(
            cu_seqlens_q=self.cu_q,
            cu_seqlens_k=self.cu_k,
            causal=self.causal,
            top_left=self.top_left,
            window_left=self.window[0],
            window_right=self.window[1],
        )

    def pack_q(self, t):
        """[b, h, s, d] to [tokens, h, d]."""
        return _pack(t, self.where_q)

    def pack_k(self, t):
        return _pack(t, self.where_k)

    def pack_rows(self, t):
        """[b, h, s] to [h, tokens]."""
        t = t.transpose(0, 1).flatten(1)
        return (t if self.where_q is None else t.index_select(1, self.where_q)).contiguous()

    def unpack_q(self, t):
        """[tokens, h, d] to [b, h, s, d], 0 for queries that see no key."""
        if self.where_q is not None:
            whole = t.new_zeros(self.batch * self.queries, *t.shape[1:])
            t = whole.index_copy(0, self.where_q, t)
        return t.unflatten(0, (self.batch, self.queries)).transpose(1, 2)

    def unpack_k(self, t):
        """As :meth:`unpack_q` for gradients of keys: copies of a key add up."""
        if self.where_k is not None:
            whole = t.new_zeros(self.batch * self.keys, *t.shape[1:])
            t = whole.index_add(0, self.where_k, t)
        return t.unflatten(0, (self.batch, self.keys)).transpose(1, 2)

    def unpack_rows(self, t):
        """[h, tokens] to [b, h, s], -inf for queries that see no key."""
        if self.where_q is not None:
            whole = t.new_full((t.shape[0], self.batch * self.queries), -torch.inf)
            t = whole.index_copy(1, self.where_q, t)
        return t.unflatten(1, (self.batch, self.queries)).transpose(0, 1)


def _pack(t, where):
    t = t.transpose(1, 2).flatten(0, 1)
    return t if where is None else t.index_select(0, where)


# --- attention ------------------------------------------------------------------------------------


def attention_with_mask(q, k, v, mask, *, is_causal=False, softmax_scale=None, recipe="vectorwise"):
    """(out, lse) of q [b, h, s, d] over the keys that a mask shows, see :func:`read`. Queries that
    see no key give 0 and -inf. On the meta device only shapes are computed."""
    options, (q, k, v) = dense(
        q, k, v, False, softmax_scale, (-1, -1), "bhsd", "bottom_right", recipe, "int8"
    )
    documents = read(spelled_out(mask, q.device), q, k, is_causal)
    return forward(q, k, v, options, documents, save_codes=as_recipe(recipe).save_codes)


def forward(q, k, v, options, documents=None, *, save_codes=True):
    """(out, lse) of [b, h, s, d] tensors. Without documents the options describe the mask."""
    if documents is not None:
        options = documents.options(options)
    switches = dict(
        deterministic=torch.are_deterministic_algorithms_enabled(), save_codes=save_codes
    )
    if documents is None or documents.cu_q is None:
        return padding.forward(q, k, v, options, **switches)[:2]
    packed = (documents.pack_q(q), documents.pack_k(k), documents.pack_k(v))
    out, lse, _ = padding.forward(*packed, options, **switches)
    return documents.unpack_q(out), documents.unpack_rows(lse)


def backward(dout, q, k, v, out, lse, options, documents=None):
    """(dq, dk, dv) of [b, h, s, d] tensors."""
    if documents is not None:
        options = documents.options(options)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if documents is None or documents.cu_q is None:
        return padding.backward(dout, q, k, v, out, lse, None, options, deterministic=deterministic)
    dout, q, out = (documents.pack_q(t) for t in (dout, q, out))
    k, v = documents.pack_k(k), documents.pack_k(v)
    packed = (dout, q, k, v, out, documents.pack_rows(lse), None)
    dq, dk, dv = padding.backward(*packed, options, deterministic=deterministic)
    return documents.unpack_q(dq), documents.unpack_k(dk), documents.unpack_k(dv)


# --- reading --------------------------------------------------------------------------------------


def read(mask, q, k, is_causal=False):
    """The :class:`Documents` of a mask for q [b, h, s, d] and k [b, hk, sk, d]; None without a
    mask, and on the meta device, where there are no values.

    The mask broadcasts to [b, h, s, sk]. It is bool (True: seen) or a float of 0 and, for hidden
    keys, -inf or a large negative number. Its values are read: on a GPU the call waits for them.
    Raises NotImplementedError for a mask that cannot be used, TypeError and ValueError for one that
    makes no sense.
    """
    if mask is None:
        return None
    if is_causal:
        raise ValueError("attn_mask, is_causal: expected one of them; make the mask itself causal")
    check(mask)
    if q.device.type == "meta":
        return None
    (b, h, s, _), sk = q.shape, k.shape[2]
    if mask.device.type == "meta":
        raise ValueError("attn_mask: expected a tensor with values, got one on the meta device")
    if mask.device != q.device:
        raise ValueError(f"attn_mask: expected q's device {q.device}, got {mask.device}")
    whole = expanded(mask, (b, h, s, sk)).detach()
    if whole.numel() == 0:
        return Documents(b, s, sk)
    try:
        return documents_of(_visible(_without_repeats(whole)), b, s)
    except _Unreadable as error:
        raise _refusal(mask, *error.args) from None


def spelled_out(mask, device):
    """A mask whose numbers say what it means. Those of PyTorch's CausalBias do not: nobody has
    written them, and they are on the CPU."""
    bias = sys.modules.get("torch.nn.attention.bias")  # importing it takes long
    if bias is None or not isinstance(mask, bias.CausalBias):
        return mask
    queries, keys = mask.seq_len_q, mask.seq_len_kv
    offset = keys - queries if mask.variant == bias.CausalVariant.LOWER_RIGHT else 0
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset)


def check(mask):
    """Raises for a mask that cannot be read, as far as that is known without its values."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask: expected a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attn_mask: expected bool or a float, got {mask.dtype}; give booleans, True where a "
            "key is seen"
        )
    if mask.requires_grad:
        raise _refusal(mask, "it requires a gradient (a learned bias)")


def expanded(mask, shape):
    """The mask broadcast to a shape."""
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to {tuple(shape)}, got "
            f"{tuple(mask.shape)}"
        ) from None


class _Unreadable(Exception):
    """Says what is wrong with a mask and, if it is not the usual one, the remedy."""


def _refusal(mask, what, remedy=_REMEDY):
    return NotImplementedError(
        f"attn_mask of shape {tuple(mask.shape)} is not supported: {what}; {remedy}"
    )


def _without_repeats(mask):
    """The mask without what expand() repeated. Batch, heads and queries may then have size 1."""
    for dim in range(mask.dim() - 1):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _visible(mask):
    """A mask [b, h, s, sk] as bool [b, s, sk]."""
    mask, heads = mask[:, :1], mask
    if heads.shape[1] > 1 and not torch.equal(heads, mask.expand_as(heads)):
        raise _Unreadable("it differs between heads")
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= _HIDDEN
    if not (hidden | (mask == 0)).all():
        raise _Unreadable("it adds a bias")
    # Softmax is relative to the largest number of a row: if that is finite, its keys are visible.
    if (hidden.all(-1) & (mask > -torch.inf).any(-1)).any():
        raise _Unreadable(
            "it hides all keys of a query by a finite number, which hides none of them",
            "use booleans or -inf",
        )
    return ~hidden


def documents_of(visible, b, s):
    """The :class:`Documents` of bool [b or 1, s or 1, sk]; no dimension is 0."""
    entries, rows, sk = visible.shape
    found = _bands(visible) or _equal_rows(visible)
    if found is None:
        raise _Unreadable(
            "it is no causal mask or window within documents, and its queries see too many "
            "different sets of keys"
        )
    where_q, where_k, length_q, length_k, (left, right), top_left = found
    # Repeat again what was left out as a repetition. A single row for all queries has no window,
    # because each of its documents has one query.
    if rows < s:
        where_q = (where_q[:, None] * s + torch.arange(s, device=visible.device)).flatten()
        length_q = length_q * s
    if entries < b:
        entry = torch.arange(b, device=visible.device)[:, None]
        where_q, where_k = (entry * s + where_q).flatten(), (entry * sk + where_k).flatten()
        length_q, length_k = length_q.repeat(b), length_k.repeat(b)
    where_q, where_k = _unless_all(where_q, b * s), _unless_all(where_k, b * sk)
    causal = right == 0
    mask = dict(causal=causal, top_left=top_left, window=(left, -1 if causal else right))
    # Every entry has a document of its own where all queries see a key.
    if where_q is None and where_k is None and len(length_q) == b:
        return Documents(b, s, sk, **mask)
    return Documents(b, s, sk, where_q, where_k, _offsets(length_q), _offsets(length_k), **mask)


def _unless_all(where, n):
    """None in place of the indices of all n tokens in order."""
    is_all = len(where) == n and torch.equal(where, torch.arange(n, device=where.device))
    return None if is_all else where


def _offsets(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _bands(visible):
    """(where_q, where_k, lengths of queries, of keys, window, top_left) of documents whose tokens
    lie together and which all have the same window. None if the mask is not of this kind."""
    b, s, sk = visible.shape
    device = visible.device
    where_q = visible.any(2).flatten().nonzero().flatten()
    seen_k = visible.any(1).flatten()
    where_k = seen_k.nonzero().flatten()
    if len(where_q) == 0:
        return where_q, where_k, where_q, where_k, (-1, -1), False
    # Keys are counted over the whole batch, without those that nobody sees.
    number = seen_k.cumsum(0) - 1
    rows = visible.reshape(b * s, sk).index_select(0, where_q).view(torch.uint8)
    start = where_q // s * sk
    first = number[start + rows.argmax(1)]
    last = number[start + sk - 1 - rows.flip(1).argmax(1)]
    if not torch.equal(rows.sum(1), last - first + 1):
        return None  # keys with gaps between them

    # A document starts where all keys seen so far lie before all keys seen from here on.
    pad = torch.nn.functional.pad
    before = pad(last.cummax(0).values, (1, -1), value=-1)
    after = first.flip(0).cummin(0).values.flip(0)
    starts_q = (after > before).nonzero().flatten()
    starts_k = before[starts_q] + 1
    length_q = pad(starts_q, (0, 1), value=len(where_q)).diff()
    length_k = pad(starts_k, (0, 1), value=len(where_k)).diff()

    # Positions within the document.
    own = lambda x: x.repeat_interleave(length_q)
    i = torch.arange(len(where_q), device=device) - own(starts_q)
    first, last, n = first - own(starts_k), last - own(starts_k), own(length_k)
    for top_left in (False, True):
        at = i if top_left else i + n - own(length_q)
        left = _side(at - first, first > 0, at)
        right = _side(last - at, last < n - 1, n - 1 - at)
        if left is not None and right is not None:
            return where_q, where_k, length_q, length_k, (left, right), top_left
    return None


def _side(reach, ends, least):
    """The number of keys that every query sees to one side. It is ``reach`` where the window ends
    the view, and at least ``least`` where the document ends it. -1 for an open side, None if no
    single number fits."""
    if not ends.any():
        return -1
    size = int(reach[ends][0])
    fits = size >= 0 and bool((reach[ends] == size).all()) and bool((least[~ends] <= size).all())
    return size if fits else None


def _equal_rows(visible):
    """As :func:`_bands`, but without a window: queries with equal rows make a document. None if the
    documents have too many keys."""
    b, s, sk = visible.shape
    device = visible.device
    # Each row gets a sum of random integers, one per visible key. The sums are exact, so equal rows
    # have equal sums. Different rows with equal sums are unlikely, and the check below finds them.
    fixed = torch.Generator("cpu").manual_seed(0)
    weights = torch.randint(2**36, (sk,), generator=fixed, device="cpu").double().to(device)
    sums = torch.stack([rows.double() @ weights for rows in visible])
    _, kind = torch.unique(sums, return_inverse=True)
    kind = kind + torch.arange(b, device=device)[:, None] * (kind.max() + 1)
    _, document = torch.unique(kind.flatten(), return_inverse=True)  # in the order of entries
    size = torch.bincount(document)
    order = torch.argsort(document, stable=True)
    first = order[size.cumsum(0) - size]  # a query of each document
    rows = visible.reshape(b * s, sk)
    keys = rows[first]
    if keys.sum() > _COPIES * b * sk or not torch.equal(keys[document], rows):
        return None
    sees = keys.any(1)
    of_key, key = keys.nonzero(as_tuple=True)
    where_q, where_k = order[sees[document[order]]], first[of_key] // s * sk + key
    return where_q, where_k, size[sees], keys.sum(1)[sees], (-1, -1), False
