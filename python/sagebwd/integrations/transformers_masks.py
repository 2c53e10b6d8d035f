# SPDX-License-Identifier: Apache-2.0
"""Masks of Hugging Face transformers as documents of a packed batch.

transformers describes a mask by a function of (query, key), by the slots that queries and keys take
in the sequence, and by a padding mask over the slots. :func:`mask` keeps that description as a
:class:`Pattern`, and the attention call gets it instead of a mask tensor. A pattern is never None,
so model code that reads the mask as a tensor fails instead of running without one.
"""

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

# Documents of a compiled graph, where their number cannot be read: one per this many tokens.
TOKENS_PER_DOCUMENT = 64

REMEDY = (
    "use attn_implementation='sdpa' for this model, or for this part of it "
    "(attn_implementation={'text_config': ..., 'vision_config': ...})"
)


class Unsupported(NotImplementedError):
    """What this hook does not do. ``elsewhere``: PyTorch's attention in transformers does it, so
    that ``register(fallback=...)`` helps."""

    def __init__(self, what, remedy, elsewhere=True):
        more = ", or register(fallback='sdpa') to run such layers on PyTorch's attention"
        super().__init__(f"sagebwd: {what}; {remedy}{more if elsewhere else ''}")
        self.what, self.elsewhere = what, elsewhere
        self.parts = (what, remedy, elsewhere)  # a kept exception would keep the tensors it passed


class Rows:
    """Which tokens make up which document, for ``attention_varlen``.

    ``order`` lists the tokens of the flattened batch document by document, those of no document
    last; None means that they are in this order already. ``cu`` holds the offsets into that order.
    """

    def __init__(self, cu_q, cu_k, order_q=None, order_k=None):
        self.cu_q, self.cu_k, self.order_q, self.order_k = cu_q, cu_k, order_q, order_k


class _MaskIsRead(NotImplementedError, AttributeError):
    def __init__(self, what):
        super().__init__(
            f"sagebwd: this model {what}, which is a description here and not a tensor; {REMEDY}"
        )


class Pattern:
    """The mask of one attention call.

    causal, window
        As in :func:`sagebwd.attention`; the last query sits at the last key.
    visible
        bool [b, kv], the keys that are neither padding nor empty slots of a cache; None: all.
    first
        Slot of the first query among the keys, an int or a tensor. None: the queries have no slots
        (cross-attention), so padding of the keys does not concern them.
    documents
        int [b, kv]: keys are seen by the queries of the same document only. None: one per row.
    count
        The largest number of documents in the batch.
    """

    ndim = 4  # transformers hands masks of four dimensions through as they are

    def __init__(self, shape, causal, window=(-1, -1), visible=None, first=None, documents=None,
                 count=None):  # fmt: skip
        self.shape, self.causal, self.window = tuple(shape), causal, window
        self.visible, self.first = visible, first
        self.documents, self.count = documents, shape[0] if count is None else count
        self._rows = self.known = None
        self.later = None  # Rows of tokens that also see later ones, as those of an image do
        self.position_ids = None  # those of the queries, if known
        self.chunks_of_rows = False  # the documents are chunks, counted from the start of a row
        self.source = None  # how transformers makes its own mask, for layers that fall back
        self.why = None  # parts of Unsupported: only the source knows what this mask hides

    def to(self, device, **_):
        """A copy on another device, for models that are spread over several."""
        move = lambda t: t.to(device) if isinstance(t, torch.Tensor) else t
        moved = Pattern(
            self.shape, self.causal, self.window, *map(move, (self.visible, self.first,
                                                              self.documents)), self.count
        )  # fmt: skip
        moved.chunks_of_rows = self.chunks_of_rows
        moved.position_ids = move(self.position_ids)
        moved.source, moved.why = self.source, self.why
        moved.later = None if self.later is None else Rows(*map(move, vars(self.later).values()))
        return moved

    def contiguous(self):
        return self

    # Code that takes the mask for a tensor must fail with an error that names the remedy.

    def __getattr__(self, name):
        raise _MaskIsRead(f"reads the {name!r} of its attention mask")

    def __getitem__(self, index):
        """The last queries alone, which Gemma 4 asks for where layers share keys."""
        b, _, s, kv = self.shape
        plain = self.documents is None and self.later is None and self.first is not None
        if not (plain and _cuts_queries_alone(index)):
            raise _MaskIsRead("cuts its attention mask")
        start = index[2].indices(s)[0]
        cut = Pattern((b, 1, s - start, kv), self.causal, self.window, self.visible,
                      self.first + start)  # fmt: skip
        if self.position_ids is not None and self.position_ids.shape[-1] == s:
            cut.position_ids = self.position_ids[..., start:]
        cut.source = None if self.source is None else self.source.cut(start)
        cut.why = self.why
        return cut

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise _MaskIsRead(f"computes with its attention mask ({function.__name__})")

    def rows(self):
        """The documents as :class:`Rows`; None if only causality and the window hide keys."""
        if self.visible is None and self.documents is None:
            return None
        if self._rows is not None:
            return self._rows
        rows = self._make_rows()
        if not traced(rows.cu_q):
            self._rows = rows
        return rows

    def _make_rows(self):
        b, _, s, kv = self.shape
        if self.documents is None:
            ids = torch.arange(b, device=self.visible.device)[:, None].expand(b, kv)
        else:
            ids = self.documents
        if self.visible is None:  # documents lie one after the other
            cu = _offsets(ids.flatten(), self.count)
            return Rows(cu, cu)
        ids = ids.masked_fill(~self.visible, self.count)
        keys = _sorted(ids, self.count)
        if self.first is None:
            queries = torch.arange(b + 1, device=ids.device, dtype=torch.int32) * s, None
        elif s == kv and not isinstance(self.first, torch.Tensor):
            queries = keys
        else:
            slots = self.first + torch.arange(s, device=ids.device)
            queries = _sorted(ids.gather(1, slots.expand(b, s)), self.count)
        return Rows(queries[0], keys[0], queries[1], keys[1])

    def split(self, starts, room):
        """This pattern with one more document at every True of ``starts``, bool [b, s].

        Padding belongs to no document, wherever it lies.
        """
        b, _, s, kv = self.shape
        starts = starts.expand(b, s).clone()
        starts[:, 0] = True
        ids = starts.flatten().cumsum(0).view(b, s) - 1
        count = room if traced(ids) else int(ids[-1, -1]) + 1
        if traced(ids):
            torch._assert_async(
                ids[-1, -1] < count,
                f"sagebwd: more than {count} packed documents in a compiled or traced graph; "
                "tell their number to register(packed=...)",
            )
        return Pattern(self.shape, self.causal, self.window, self.visible, self.first, ids, count)


def _cuts_queries_alone(index):
    whole = slice(None)
    if not isinstance(index, tuple) or len(index) != 4:
        return False
    *others, rows = index[0], index[1], index[3], index[2]
    return all(i == whole for i in others) and (
        isinstance(rows, slice) and rows.stop is None and rows.step is None
    )


class Source:
    """How transformers makes the mask of one of its own implementations: its mask function and
    arguments. The tensor is made when a layer needs it, and once for all layers."""

    def __init__(self, args, kwargs, start=0):
        # A static cache counts on in the tensor that it gave as an offset.
        still = lambda x, name: x.clone() if name in _COUNTERS and torch.is_tensor(x) else x
        self.args = tuple(still(x, "q_offset" if i == 3 else "") for i, x in enumerate(args))
        self.kwargs = {name: still(x, name) for name, x in kwargs.items()}
        self.start, self._made = start, {}
        self.position_ids = None  # those of the queries, if known
        self.checked = None  # documents that were compared with those of the mask

    def cut(self, start):
        cut = Source(self.args, self.kwargs, self.start + start)
        if self.position_ids is not None:
            cut.position_ids = self.position_ids[..., start:]
        return cut

    def tensor(self, name, device):
        """The mask for ``attn_implementation=name``; None where it does without."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        if name in self._made:
            return self._made[name]
        given = self.kwargs
        if self.start:  # causality is no longer told by the lengths
            given = dict(given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        made = ALL_MASK_ATTENTION_FUNCTIONS[name](*self.args, **given)
        if made is not None:
            made = made[:, :, self.start :].to(device)
        if made is None or not traced(made):
            self._made[name] = made
        return made

    def documents(self):
        """Which document each token belongs to, as transformers found it in position_ids; None: it
        found none, or did not look, or counts chunks on from document to document, as
        older versions do."""
        leaves = dict(_all_leaves(self.kwargs["mask_function"]))
        kinds = {name.split(".")[0]: leaf for name, leaf in leaves.items()}
        if "packed_sequence_mask_function" not in kinds:
            return None
        if "chunked_overlay" in kinds and "remap_positions_for_packed_sequence" not in kinds:
            return None
        return _captured(kinds["packed_sequence_mask_function"], "packed_sequence_mask")


_COUNTERS = ("q_offset", "cache_position")


def room_for(b, s, packed):
    """How many documents a compiled graph has room for. Each costs up to a tile of memory."""
    if packed is not True:
        return min(b * s, packed)
    return min(b * s, b + max(64, b * s // TOKENS_PER_DOCUMENT))


def _offsets(sorted_ids, count):
    bounds = torch.arange(count + 1, device=sorted_ids.device)
    return torch.searchsorted(sorted_ids, bounds, out_int32=True)


def _sorted(ids, count):
    """Offsets of the documents, and the order that puts them one after the other."""
    ids = ids.flatten()
    order = torch.argsort(ids, stable=True)
    return _offsets(ids[order], count), order


# --- what transformers calls ----------------------------------------------------------------------


def mask(*args, packed=True, position_ids=None, fallback=False, **kwargs):
    """The pattern of a mask. One that documents cannot express raises Unsupported; with fallback it
    is a pattern that has the reason and the source."""
    if isinstance(kwargs.get("attention_mask"), Pattern):
        # generate() makes the masks of static caches ahead of the model
        return kwargs["attention_mask"]
    try:
        pattern = _read(*args, packed=packed, position_ids=position_ids, **kwargs)
    except Unsupported as why:
        if not (fallback and why.elsewhere):
            raise
        pattern = _unread(*args, **kwargs)
        pattern.why, pattern.position_ids = why.parts, position_ids
    if fallback:
        pattern.source = Source(args, kwargs)
        pattern.source.position_ids = position_ids
    return pattern


def _unread(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, *, mask_function,
            cache_position=None, attention_mask=None, **_):  # fmt: skip
    """What is known of a mask whose function is not."""
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    causal = any(name == "causal_mask_function" for name, _ in _all_leaves(mask_function))
    visible = _visible(attention_mask, kv_offset, kv_length)
    shape = (batch_size, 1, q_length, kv_length)
    return Pattern(shape, causal, (-1, -1), visible, q_offset - kv_offset)


def _visible(attention_mask, kv_offset, kv_length):
    """bool [b, kv] of a padding mask; None if nothing is hidden."""
    if attention_mask is None:
        return None
    missing = max(0, kv_offset + kv_length - attention_mask.shape[-1])
    visible = F.pad(attention_mask.bool(), (0, missing))[:, kv_offset : kv_offset + kv_length]
    return None if _readable(visible) and visible.all() else visible


def _read(
    batch_size,
    q_length=None,
    kv_length=None,
    q_offset=0,
    kv_offset=0,
    *,
    mask_function,
    cache_position=None,
    attention_mask=None,
    packed=True,
    device=None,
    position_ids=None,
    **_,
):
    if cache_position is not None:  # older transformers: the slots of the queries
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        q_offset = int(q_offset) if _readable(q_offset) else q_offset
    kind = _Kind(mask_function)  # knows every function in it, so that it need not be evaluated
    shape = (batch_size, 1, q_length, kv_length)
    first = q_offset - kv_offset
    visible = _visible(attention_mask, kv_offset, kv_length)
    window = kind.window
    if kind.causal:
        visible = _seen(visible, first, shape, device)
    elif window != (-1, -1):
        window, first = _two_sided(window, first, q_length, kv_length)
    else:
        first = None  # full attention: which slots the queries have does not matter
    if visible is not None and _shorter(window, kv_length):
        what = "padding between tokens of one row cannot be combined with a sliding window"
        refuse(_has_holes(visible), what, "pad on one side")
    pattern = Pattern(shape, kind.causal, window, visible, first)
    pattern.position_ids = position_ids
    if kind.blocks is not None:
        blocks = kind.blocks[:, kv_offset : kv_offset + kv_length]
        pattern.later = _later(pattern, blocks, kind)
    chunks = None
    if kind.chunk is not None:
        slots = torch.arange(kv_length, device=kind.left_padding.device) + kv_offset
        chunks = _chunks(kind, slots)
    if kind.packed is not None:
        if packed is False and _readable(kind.packed):
            raise ValueError(
                "sagebwd: register(packed=False) promises that position_ids hold one document per "
                "row, but they start again within a row; register with packed=True"
            )
        if packed is not False:
            # transformers looks for documents only where queries and keys are the same tokens.
            room, begin = room_for(batch_size, q_length, packed), starts(kind.packed)
            if chunks is None:
                return pattern.split(begin, room)
            # Chunks belong to a document. Older transformers count them from the start of the row.
            positions = position_ids if kind.positions is None else kind.positions
            if positions is None:
                what = (
                    "chunks of packed documents, counted from the start of a row, are not supported"
                )
                raise Unsupported(what, "give one document a row", elsewhere=False)
            chunks = _chunks(kind, positions.expand(batch_size, -1))
            room = min(batch_size * q_length, room + batch_size * (kv_length // kind.chunk + 1))
            return pattern.split(begin | starts(chunks), room)
    return pattern if chunks is None else _within(pattern, chunks, kind, kv_offset)


class _Kind:
    """What a mask function says, from the functions it is an intersection of."""

    def __init__(self, function):
        self.causal, self.window = False, (-1, -1)
        self.chunk = self.left_padding = self.packed = self.positions = self.blocks = None
        for name, leaf in _leaves(function):
            if name == "causal_mask_function":
                self.causal = True
            elif name == "bidirectional_mask_function":
                pass
            elif name.startswith("sliding_window_overlay."):
                # This window always comes with causality, which hides the later keys.
                self.window = (max(_captured(leaf, "sliding_window") - 1, 0), -1)
            elif name.startswith("sliding_window_bidirectional_overlay."):
                self.window = (_captured(leaf, "sliding_window"),) * 2
            elif name.startswith("packed_sequence_mask_function."):
                self.packed = _captured(leaf, "packed_sequence_mask")
            elif name.startswith("remap_positions_for_packed_sequence."):
                self.positions = _captured(leaf, "position_ids")
            elif name.startswith("blockwise_overlay."):
                self.blocks = _captured(leaf, "block_sequence_ids")
            elif name.startswith("chunked_overlay."):
                self.chunk = _captured(leaf, "chunk_size")
                self.left_padding = _captured(leaf, "left_padding")
            else:
                raise _unsupported(name)
        if self.window[0] >= 0 and self.window[1] < 0 and not self.causal:
            raise _unsupported("a one-sided window without causality")


def _leaves(function):
    """[(name, function)] of the functions that a mask function is an intersection of."""
    name = function.__qualname__
    if name.startswith("remap_positions_for_packed_sequence."):
        # The rest counts positions from the start of each document (transformers 5.23). Causality
        # and windows are the same within a document either way; chunks are not.
        return [(name, function), *_leaves(_captured(function, "mask_function"))]
    if name.startswith("and_masks."):
        return [leaf for part in _captured(function, "mask_functions") for leaf in _leaves(part)]
    if name.startswith("or_masks."):
        # One part may be blocks that see each other both ways, as images do.
        parts = _captured(function, "mask_functions")
        rest = [f for f in parts if not f.__qualname__.startswith("blockwise_overlay.")]
        if len(rest) == 1 and len(parts) == 2:
            (blocks,) = [f for f in parts if f is not rest[0]]
            return [(blocks.__qualname__, blocks), *_leaves(rest[0])]
        raise _unsupported("a union of patterns")
    return [(name, function)]


def _all_leaves(function):
    """As :func:`_leaves`, of any function."""
    name = function.__qualname__
    if name.startswith("remap_positions_for_packed_sequence."):
        return [(name, function), *_all_leaves(_captured(function, "mask_function"))]
    if name.startswith(("and_masks.", "or_masks.")):
        parts = _captured(function, "mask_functions")
        return [leaf for part in parts for leaf in _all_leaves(part)]
    return [(name, function)]


def _captured(function, name):
    """A variable that a nested function holds."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _unsupported(what):
    return Unsupported(f"attention masks of the kind {what!r} are not supported", REMEDY)


# --- slots ----------------------------------------------------------------------------------------


def _seen(visible, first, shape, device):
    """Hides the slots behind the last query: those of a static cache that are still empty."""
    b, _, s, kv = shape
    used = first + s
    if not isinstance(used, torch.Tensor):
        if used == kv:
            return visible
        if used > kv:
            raise Unsupported(
                f"queries at slots {first} to {used - 1} behind the last of {kv} keys are not "
                "supported",
                REMEDY,
            )
        used = torch.full((), used, device=device)  # a tensor: a compiled decoding step stays valid
    written = (torch.arange(kv, device=used.device) < used).expand(b, kv)
    return written if visible is None else visible & written


def _two_sided(window, first, s, kv):
    """(window, first) of a window without causality. A kernel has the last query at the last key;
    elsewhere a window can be served only if it hides nothing."""
    if not isinstance(first, torch.Tensor):
        if first + s == kv:
            return window, first
        if max(first + s - 1, kv - 1 - first) <= window[0]:
            return (-1, -1), None
    raise Unsupported(
        "a window to both sides of queries that do not end with the last key is not supported "
        f"({s} queries, {kv} keys)",
        REMEDY,
    )


def _chunks(kind, positions):
    """Number of each key's chunk, [b, kv]. They are counted from the first real token."""
    return (positions - kind.left_padding[:, None]).div(kind.chunk, rounding_mode="floor") + 1


def _within(pattern, chunks, kind, kv_offset):
    """The pattern with a document for every chunk of every row."""
    b, _, s, kv = pattern.shape
    count = (kv_offset + kv - 1) // kind.chunk + 2
    visible = pattern.visible
    if visible is None:  # queries may be fewer than keys: finds which are whose
        visible = torch.ones_like(chunks, dtype=torch.bool)
    ids = torch.arange(b, device=chunks.device)[:, None] * count + chunks
    chunked = Pattern(pattern.shape, True, (-1, -1), visible, pattern.first, ids, b * count)
    chunked.chunks_of_rows, chunked.position_ids = True, pattern.position_ids
    return chunked


def _later(pattern, blocks, kind):
    """The blocks of a mask as documents in which a token sees the later ones, and only those. None
    if no token does.

    Documents lie backwards here, so that a causal mask shows the later tokens. The first token of a
    block is nobody's later one. Without it among the keys, the last query, which is aligned with
    the last key, sees all of them, and each one before it one less: never itself.
    """
    message = "tokens that see each other both ways inside a causal mask (images) "
    if not _readable(blocks) or isinstance(pattern.first, torch.Tensor):
        what = "in a compiled graph or with a static cache are not supported"
        refuse((blocks >= 0).any(), f"{message}{what}", REMEDY)
        return None
    b, _, s, kv = pattern.shape
    if blocks.shape != (b, kv):
        raise Unsupported(
            f"{message}are given for other tokens ({list(blocks.shape)}) than the keys ({[b, kv]})",
            REMEDY,
        )
    # Earlier tokens of a cache ask nothing, and are no later token of any that does.
    slots = torch.arange(kv, device=blocks.device)
    inside = (blocks >= 0) & (slots >= pattern.first) & (slots < pattern.first + s)
    if pattern.visible is not None:
        inside &= pattern.visible
    if not inside.any():
        return None
    if not pattern.causal or kind.packed is not None or kind.chunk is not None:
        raise Unsupported(
            f"{message}beside packed documents or chunks are not supported",
            f"give one document a row, or {REMEDY}",
        )
    row, slot = inside.nonzero(as_tuple=True)
    row, slot = row.flip(0), slot.flip(0)
    ids = torch.unique(torch.stack((row, blocks[row, slot])), dim=1, return_inverse=True)[1]
    count = int(ids.max()) + 1
    order = torch.argsort(ids, stable=True)
    ids, row, slot = ids[order], row[order], slot[order]
    seen = F.pad(ids.diff() == 0, (0, 1))  # not the last of its document, which is its first token
    return Rows(
        _offsets(ids, count),
        _offsets(ids[seen], count),
        row * s + slot - pattern.first,
        (row * kv + slot)[seen],
    )


def describe(mask):
    if isinstance(mask, torch.Tensor):
        return f"{str(mask.dtype).removeprefix('torch.')} of shape {list(mask.shape)}"
    return type(mask).__name__


def starts(ids):
    """Where a document starts, from an index of the document for each token."""
    return F.pad(ids.diff(dim=-1) != 0, (1, 0))


def _has_holes(visible):
    """Whether a row has hidden keys between visible ones."""
    starts = visible & ~F.pad(visible, (1, -1))
    return (starts.sum(1) > 1).any()


def _shorter(window, kv_length):
    return 0 <= window[0] < kv_length


def traced(t):
    """Whether a graph is being made for other numbers than those of t, if it has any."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(t, FakeTensor)


def _readable(t):
    return not (traced(t) or t.device.type == "meta")


def refuse(condition, what, remedy, elsewhere=True):
    """Unsupported if a tensor holds True. A compiled graph raises when it runs."""
    if traced(condition):
        # A graph cannot choose another attention by what it reads.
        torch._assert_async(~condition, str(Unsupported(what, remedy, elsewhere=False)))
    elif _readable(condition) and condition:
        raise Unsupported(what, remedy, elsewhere)
