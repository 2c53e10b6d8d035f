# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for Hugging Face transformers.

    from sagebwd.integrations import transformers as sage
    sage.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="sagebwd")

Padding on any side, packed sequences (``position_ids`` that start again, ``seq_idx`` or
``cu_seq_lens_*``), sliding windows, chunks, caches of every kind, cross-attention, grouped queries
and attention sinks work as in the other implementations. Dropout, biases, soft capping and masks of
other kinds raise NotImplementedError, or run on PyTorch's attention with
``register(fallback="sdpa")``. docs/transformers.md lists what was tried with each family of models.
"""

import inspect
import math
import os
import sys
import threading
import weakref

import torch

from .. import sinks
from ..attention import attention, attention_varlen
from ..recipe import MATMULS, Recipe, as_recipe
from . import transformers_fallback as fallbacks_
from . import transformers_masks as masks
from .transformers_masks import Unsupported

# Keywords that reach every attention call and do not concern it.
_HARMLESS = frozenset(
    "cache_position past_key_values use_cache output_hidden_states return_dict labels "
    "num_items_in_batch logits_to_keep num_logits_to_keep output_router_logits max_length_q "
    "max_length_k".split()
)

# Keywords that change attention in a way that is not supported.
_UNSUPPORTED = {
    "position_bias": "a bias of the logits",
    "attn_bias": "a bias of the logits",
    "head_mask": "a mask over heads",
    "indices": "sparse attention over chosen keys",
    "block_indices": "sparse attention over chosen blocks",
    "cache": "a paged cache (continuous batching)",
}

_OLDEST = (5, 17)  # the oldest transformers that is tested; pyproject.toml names it too

_registered = {}  # name: notes of what fell back


def register(
    name="sagebwd",
    *,
    recipe="vectorwise",
    backward="int8",
    exact_layers=(),
    packed=True,
    ignore=(),
    fallback=None,
):
    """Makes ``attn_implementation=name`` available, for attention and for masks. Returns the name.

    exact_layers
        Indices of layers whose matmuls all stay in floating point: a switch for layers that
        ``sagebwd.diagnose`` finds sensitive. Models whose attention does not know its index (ViT,
        CLIP, ...) need :func:`number_layers` first.
    packed
        Whether ``position_ids`` may hold several documents per row. Outside of compiled graphs they
        are read once per forward. A compiled graph has room for one document per 64 tokens, or for
        the number given here, and raises if there are more. False promises that no row is packed,
        which saves both. Offsets given as ``cu_seq_lens_*`` are always obeyed.
    ignore
        Names of further keywords that reach the attention call and do not concern it.
    fallback
        ``"sdpa"`` runs layers that are not supported (head dims over 256, soft capping, dropout,
        biases, other masks) on the ``sdpa`` implementation of transformers, or on the model's eager
        one where ``sdpa`` does not do it either; ``"eager"`` runs them on the latter. One warning
        for each reason lists the layers; :func:`fallbacks` returns them. None refuses.

    Several names with different settings may be registered.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    _refuse_old_transformers()
    recipe = as_recipe(recipe)
    int8 = dict(recipe=recipe, backward=backward)
    exact = dict(recipe=Recipe(high_precision=tuple(MATMULS)), backward=backward)
    exact_layers = frozenset(exact_layers)
    if not all(isinstance(i, int) and i >= 0 for i in exact_layers):
        raise ValueError(f"exact_layers: expected layer indices, got {sorted(exact_layers)}")
    if changing := sorted(_UNSUPPORTED.keys() & set(ignore)):
        raise ValueError(f"ignore: {changing[0]!r} changes attention ({_UNSUPPORTED[changing[0]]})")
    harmless = _HARMLESS.union(ignore)
    if fallback not in (None, *fallbacks_.NAMES):
        raise ValueError(f"fallback: expected None, 'sdpa' or 'eager', got {fallback!r}")
    notes = fallbacks_.Notes()

    def forward(module, query, key, value, attention_mask, **kwargs):
        settings = exact if exact_layers and _layer(module, exact_layers) in exact_layers else int8
        own = {keyword: x for keyword, x in kwargs.items() if keyword not in harmless}
        try:
            return _forward(settings, packed, module, query, key, value, attention_mask, **own)
        except Unsupported as error:
            # Another attention would leave out the sparse-linear one of this layer.
            if fallback is None or not error.elsewhere or hasattr(module, "sla2"):
                raise
            what = error.what
        call = fallbacks_.Call(fallback, module, query, key, value, kwargs, set(own) - _KNOWN)
        pattern = attention_mask
        if pattern is None:
            known = (own.get(name) for name in ("is_causal", "sliding_window"))
            pattern = _pattern(None, module, query, key, *known)
        _refuse_unseen_documents(pattern, packed, **own)
        notes.add(what, call.name, module, pattern)
        return call.run(pattern)

    def mask(*args, **kwargs):
        positions = None if torch.compiler.is_compiling() else _positions_of(sys._getframe(1))
        options = dict(packed=packed, position_ids=positions, fallback=fallback is not None)
        return masks.mask(*args, **options, **kwargs)

    _registered[name] = notes
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    return name


def _refuse_old_transformers():
    """Masks are read by the names of transformers' functions, which older versions lack."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _OLDEST:
        raise ImportError(
            f"sagebwd: expected transformers {'.'.join(map(str, _OLDEST))} or newer, got "
            f"{transformers.__version__}; run pip install -U transformers"
        )


def _positions_of(frame):
    """The position_ids that transformers makes a mask with. With a cache it looks at them for
    nothing and does not hand them on; some models (Llama 4) do not give them to attention
    either."""
    positions = frame.f_locals.get("position_ids")
    return positions if isinstance(positions, torch.Tensor) else None


def fallbacks(name="sagebwd"):
    """{reason: layers} of what ``register(fallback=...)`` ran on PyTorch's attention so far."""
    return _registered[name].layers()


def fallback_calls(name="sagebwd"):
    """{reason: calls} of the same; calls of compiled code count when they are traced."""
    return dict(_registered[name].calls)


def is_registered(name):
    """Whether ``attn_implementation=name`` is one that :func:`register` made."""
    return name in _registered


def unregister(name="sagebwd"):
    """Removes a registered name. Models that use it must be switched to another one first."""
    from transformers import AttentionInterface, AttentionMaskInterface

    _registered.pop(name, None)
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


# --- layers ---------------------------------------------------------------------------------------


def number_layers(model):
    """Tells every attention module of a model its layer, which is the last number in its name:
    ``encoder.layer.3.attention`` is layer 3. ``exact_layers`` needs this for models where
    transformers does not do so. Returns {name: layer}."""
    layers = {}
    for name, module in model.named_modules():
        code = inspect.unwrap(type(module).forward).__code__
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if "ALL_ATTENTION_FUNCTIONS" in code.co_names and numbers:
            module._sagebwd_layer = layers[name] = numbers[-1]
    if not layers:
        raise ValueError(
            f"number_layers: {type(model).__name__} has no numbered module that calls "
            "transformers' attention interface"
        )
    return layers


_COUNTS = "num_hidden_layers encoder_layers decoder_layers num_decoder_layers num_layers".split()


def _layer(module, exact_layers):
    """The index of a module's layer. ValueError if it has none, or if the model has fewer layers
    than ``exact_layers`` names."""
    layer = getattr(module, "_sagebwd_layer", getattr(module, "layer_idx", None))
    kind = type(module).__name__
    if layer is None:
        raise ValueError(
            f"exact_layers: {kind} does not know its layer; call "
            "sagebwd.integrations.transformers.number_layers(model) once"
        )
    config = getattr(module, "config", None)
    counts = [n for n in (getattr(config, name, None) for name in _COUNTS) if isinstance(n, int)]
    if counts and max(exact_layers) >= max(counts):
        raise ValueError(
            f"exact_layers: got layer {max(exact_layers)}, but the model of {kind} has "
            f"{max(counts)}. Parts of a model may use different names: "
            "attn_implementation={'text_config': ..., 'vision_config': ...}"
        )
    return layer


# --- attention ------------------------------------------------------------------------------------


def _forward(
    settings,
    packed,
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    position_ids=None,
    seq_idx=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    deterministic=None,
    output_attentions=False,
    **kwargs,
):
    """The call of transformers: query [b, h, s, d], result ([b, s, h, d], None)."""
    _refuse_options(module, dropout, output_attentions, kwargs)
    query, key, value = _one_dtype(query, key, value)
    d = query.shape[-1]
    scaling = 1 / math.sqrt(d) if scaling is None else scaling
    _refuse_wide_heads(query, value)

    query, key, value = _one_batch(query, key, value)
    pattern = _pattern(attention_mask, module, query, key, is_causal, sliding_window)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        _refuse_images_of_documents(pattern, True)
        rows = _given_rows(pattern, cu_seq_lens_q, cu_seq_lens_k)
    else:
        rows = _with_documents(pattern, position_ids, seq_idx, packed).rows()

    deterministic = deterministic or os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"
    if (layer := getattr(module, "sla2", None)) is not None:
        if softcap:
            raise NotImplementedError(
                "sla2: soft capping of logits, which sla2 does not support; convert another model"
            )
        _refuse_beside_sla2(layer, pattern, rows, scaling * math.sqrt(d), s_aux, deterministic)
        out = layer(*(t.transpose(1, 2) for t in (query, key, value)))
        return out.contiguous(), None
    options = dict(
        settings,
        causal=pattern.causal,
        window_size=pattern.window,
        softmax_scale=scaling,
        softcap=softcap,
        return_lse=True,
    )
    if deterministic:
        options["deterministic"] = True
    if rows is None:
        out, lse = attention(query, key, value, layout="bhsd", **options)
        out = out.transpose(1, 2)
    else:
        out, lse = _by_rows(query, key, value, rows, options)
    if pattern.later is not None:
        out, lse = _with_later(out, lse, query, key, value, pattern.later, options)
    if s_aux is not None:
        out, _ = sinks.add(out, lse, s_aux)
    return out.contiguous(), None


def _refuse_options(module, dropout, output_attentions, kwargs):
    if dropout:
        raise Unsupported(f"attention dropout {dropout} is not supported", _dropout_remedy(module))
    if output_attentions:
        raise Unsupported(
            "output_attentions is not supported, the weights are never stored",
            "call model.set_attn_implementation('eager') to look at them",
        )
    for name, given in kwargs.items():
        if given is None:
            continue
        if name in _UNSUPPORTED:
            raise Unsupported(
                f"{name} ({_UNSUPPORTED[name]}) is not supported",
                "use attn_implementation='sdpa' for this model",
            )
        raise Unsupported(
            f"the attention keyword {name!r} is not supported",
            "use attn_implementation='sdpa' for this model, or, if the keyword does not change "
            f"attention, register(ignore=({name!r},))",
        )


def _refuse_beside_sla2(layer, pattern, rows, scale, s_aux, deterministic):
    """Raises for a call that the sparse-linear attention of a layer (sagebwd.sla2.convert) cannot
    serve. ``scale`` is relative to 1/sqrt(d)."""
    if rows is not None:
        wrong = "padding or packed documents"
        remedy = (
            "give sequences of one length, one a row (a compiled graph cannot see that they are: "
            "register(packed=False) promises it)"
        )
    elif not pattern.causal or pattern.window != (-1, -1) or pattern.later is not None:
        wrong, remedy = "a mask that is not causal alone", "convert other layers"
    elif s_aux is not None:
        wrong, remedy = "attention sinks", "convert another model"
    elif not math.isclose(scale, 1, rel_tol=1e-6):
        wrong, remedy = f"logits scaled by {scale:g}/sqrt(d)", "convert another model"
    elif deterministic and not layer.call["deterministic"]:
        wrong, remedy = "deterministic=True in the call", "give it to sla2.convert"
    else:
        return
    raise NotImplementedError(f"sla2: {wrong}, which sla2 does not support; {remedy}")


def _dropout_remedy(module):
    """Which field of the module's config holds its dropout."""
    config = getattr(module, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    fields = [name for name, x in values.items() if "drop" in name and isinstance(x, float) and x]
    about = [name for name in fields if "att" in name]
    named = " and ".join(f"{name}=0.0" for name in about or fields)
    return (
        f"load the model with {named}" if named else "build the model with dropout 0"
    ) + ", or call model.eval()"


def _one_dtype(*tensors):
    """q, k, v in one dtype. PEFT may leave queries and keys in float32 while the layer runs in 16
    bit; the values have the layer's dtype."""
    dtype = tensors[-1].dtype
    return tuple(t.to(dtype) for t in tensors)


def _one_batch(*tensors):
    """Queries that are the same for every row may come as one row."""
    b = max(t.shape[0] for t in tensors)
    return tuple(t.expand(b, -1, -1, -1) if t.shape[0] == 1 else t for t in tensors)


def _refuse_wide_heads(query, value):
    d = max(query.shape[-1], value.shape[-1])
    if d > 256:
        raise Unsupported(f"a head dim of {d} is not supported, 256 is the largest", masks.REMEDY)


_KNOWN = frozenset(inspect.signature(_forward).parameters)  # other keywords may mean anything


# --- patterns and documents -----------------------------------------------------------------------


def _pattern(attention_mask, module, query, key, is_causal, sliding_window):
    """The pattern that the model was given for its mask; without a mask, what the call says."""
    b, s, kv = query.shape[0], query.shape[2], key.shape[2]
    if isinstance(attention_mask, masks.Pattern):
        if attention_mask.why is not None:
            raise Unsupported(*attention_mask.why)
        mb, _, ms, mkv = attention_mask.shape
        free = attention_mask.visible is None and attention_mask.documents is None
        if free and not attention_mask.causal and attention_mask.window == (-1, -1):
            return masks.Pattern((b, 1, s, kv), False)  # everything is seen, however much there is
        if (ms, mkv) != (s, kv) or not (free or mb == b):
            raise Unsupported(
                f"the mask is one of {ms} queries and {mkv} keys in {mb} rows, but the call has "
                f"{s} and {kv} in {b}",
                "use attn_implementation='sdpa' for this model",
            )
        return attention_mask
    if attention_mask is not None:
        raise Unsupported(
            "attention masks drawn by the model or by the caller are not supported "
            f"({masks.describe(attention_mask)})",
            "give a padding mask [batch, tokens] to the model, or use attn_implementation='sdpa'",
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
        if is_causal is None or (is_causal and s > 1):
            # Eager attention would see every key, sdpa would not.
            raise Unsupported(
                f"{type(module).__name__} gives no mask and does not say in the call whether "
                "attention is causal",
                "use attn_implementation='eager' for this model, or for this part of it",
                elsewhere=False,
            )
    window = (-1, -1) if sliding_window is None else (sliding_window - 1,) * 2
    return masks.Pattern((b, 1, s, kv), bool(is_causal), window, first=kv - s)


def _given_rows(pattern, cu_q, cu_k):
    """Documents by offsets into the flattened batch."""
    if cu_q is None or cu_k is None:
        raise ValueError("sagebwd: expected cu_seq_lens_q and cu_seq_lens_k together, got one")
    _refuse_padding(pattern, "cu_seq_lens_q")
    _check_offsets(pattern.shape, cu_q, cu_k)
    if pattern.documents is None:
        return masks.Rows(cu_q.to(torch.int32), cu_k.to(torch.int32))
    # The mask has documents too, such as the chunks of Llama 4: split at both.
    b, _, s, kv = pattern.shape
    if s != kv:
        raise Unsupported(
            "cu_seq_lens_q with a cache is not supported here",
            "pass use_cache=False",
            elsewhere=False,
        )
    given = _starts_at(cu_q, b, s)
    _refuse_chunks_of_rows(pattern, given, "cu_seq_lens_q")
    room = min(b * s, pattern.count + cu_q.numel())
    return pattern.split(given | masks.starts(pattern.documents), room).rows()


def _starts_at(cu_q, b, s):
    """Where documents start, bool [b, s], by their offsets in the flattened batch."""
    starts = torch.zeros(b * s + 1, dtype=torch.bool, device=cu_q.device)
    return starts.index_fill(0, cu_q.long(), True)[:-1].view(b, s)


def _refuse_chunks_of_rows(pattern, starts, keyword):
    """Chunks belong to a document. Those of a row would be cut at other tokens."""
    if pattern.chunks_of_rows:
        masks.refuse(
            starts[:, 1:].any(),
            f"documents given as {keyword} cannot be combined with chunks that are counted from "
            "the start of a row",
            "pass position_ids that start again with each document, and use_cache=False",
            elsewhere=False,
        )


_checked = threading.local()  # the offsets that were looked at last: all layers have the same


def _check_offsets(shape, cu_q, cu_k):
    """Refuses offsets that leave tokens out; these would get 0."""
    b, _, s, kv = shape
    call = None
    if not masks.traced(cu_q) and not cu_q.is_inference() and not cu_k.is_inference():
        call = (b * s, b * kv, cu_q._version, cu_k._version)
        last = getattr(_checked, "last", None)
        if last and last[0]() is cu_q and last[1]() is cu_k and last[2] == call:
            return
    masks.refuse(
        (cu_q[-1] != b * s) | (cu_k[-1] != b * kv),
        f"cu_seq_lens_q and cu_seq_lens_k must end at {b * s} and {b * kv}, the tokens of all {b} "
        "rows",
        "they are those of one row, or of another part of the model, or padding has no document "
        "(give it one)",
        elsewhere=False,
    )
    if call is not None:
        _checked.last = (weakref.ref(cu_q), weakref.ref(cu_k), call)


def _refuse_padding(pattern, keyword):
    if pattern.visible is not None:
        masks.refuse(
            ~pattern.visible.all(),
            f"documents given as {keyword} cannot be combined with padding or a static cache",
            "leave attention_mask out",
            elsewhere=False,
        )


def _with_documents(pattern, position_ids, seq_idx, packed):
    """The pattern, split where positions start again under a causal mask, or where ``seq_idx``
    names another document."""
    b, _, s, kv = pattern.shape
    known_ids = pattern.documents
    if s == 1:
        return pattern
    if position_ids is None:
        position_ids = pattern.position_ids
    if pattern.known and pattern.known[0] is position_ids and pattern.known[1] is seq_idx:
        return pattern if pattern.known[2] is None else pattern.known[2]
    starts = None if known_ids is None else masks.starts(known_ids)
    # Several position axes, as vision models have, say nothing about documents.
    if packed is not False and pattern.causal and position_ids is not None:
        if position_ids.dim() == 2 and position_ids.shape[1] == s:
            again = _start_again(pattern, position_ids)
            _refuse_chunks_of_rows(pattern, again, "position_ids")
            if s != kv:
                _refuse_restart_beside_cache(again)
            elif starts is None:
                starts = again
    if known_ids is not None and seq_idx is None:
        if not masks.traced(known_ids):
            pattern.known = (position_ids, seq_idx, None)  # itself
        return pattern
    if seq_idx is not None:
        if s != kv:
            raise Unsupported(
                "seq_idx with a cache is not supported", "pass use_cache=False", elsewhere=False
            )
        _refuse_padding(pattern, "seq_idx")
        other = masks.starts(seq_idx)
        _refuse_chunks_of_rows(pattern, other, "seq_idx")
        starts = other if starts is None else starts | other
    split = pattern
    if pattern.later is not None and starts is not None:
        _refuse_images_of_documents(pattern, starts.any())
    if starts is not None and (known_ids is not None or masks.traced(starts) or starts.any()):
        # packed=False speaks of positions alone.
        room = masks.room_for(b, s, packed or True) + (0 if known_ids is None else pattern.count)
        split = pattern.split(starts, min(b * s, room))
    if starts is None or not masks.traced(starts):
        known = None if split is pattern else split
        pattern.known = (position_ids, seq_idx, known)  # every layer of a model asks the same
    return split


def _start_again(pattern, position_ids):
    """Where a document starts after another one of the same row, bool [b, s]. Only a position of 0
    starts one; a gap between positions does not, nor does the first token after padding."""
    b, _, s, kv = pattern.shape
    zero = (position_ids == 0).expand(b, s)
    first = 0 if pattern.first is None else pattern.first
    slots = first + torch.arange(s, device=zero.device)
    if pattern.visible is None:
        return zero & (slots > 0)
    before = pattern.visible.cumsum(1) > 1  # this one and another
    return zero & (pattern.visible & before)[:, slots]


def _refuse_images_of_documents(pattern, packed):
    if pattern.later is not None and packed:
        raise Unsupported(
            "tokens that see each other both ways (images) in packed documents are not supported",
            f"give one document a row, or {masks.REMEDY}",
            elsewhere=False,
        )


def _refuse_restart_beside_cache(again):
    masks.refuse(
        again.any(),
        "position_ids that start again (packed documents) beside a cache that holds other tokens, "
        "or room for them, are not supported",
        "pass use_cache=False, or a cache per document; if the call gave no position_ids, this "
        "model counts from 0 in every call: give them; register(packed=False) says that they are "
        "one document",
        elsewhere=False,
    )


def _refuse_unseen_documents(
    pattern, packed, position_ids=None, seq_idx=None, cu_seq_lens_q=None, **_
):
    """PyTorch's attention knows only the documents that are in transformers' mask. Those it finds
    in position_ids, where neither a cache nor a padding mask is given."""
    drawn = not isinstance(pattern, masks.Pattern)  # then its author saw to position_ids
    if drawn and seq_idx is None and cu_seq_lens_q is None:
        return
    b, _, s = pattern.shape[:3]
    if s == 1:
        return
    source = None if drawn else pattern.source
    if position_ids is None and source:
        position_ids = source.position_ids
    given = (position_ids, seq_idx, cu_seq_lens_q)
    if source and source.checked and all(x is y for x, y in zip(source.checked, given)):
        return
    starts = [] if seq_idx is None else [masks.starts(seq_idx).expand(b, s)]
    if cu_seq_lens_q is not None:
        starts.append(_starts_at(cu_seq_lens_q, b, s))
    elif packed is not False and not drawn and pattern.causal and position_ids is not None:
        if position_ids.dim() == 2 and position_ids.shape[1] == s:
            starts.append(_start_again(pattern, position_ids))
    seen = None if source is None else source.documents()
    for unseen in starts:
        if seen is not None:
            unseen = unseen & ~masks.starts(seen)
        masks.refuse(
            unseen[:, 1:].any(),
            "packed documents that PyTorch's attention does not know of",
            "transformers looks for them in position_ids alone, where neither attention_mask nor a "
            "cache is given: pass position_ids that start again with each document, and "
            "use_cache=False; for models that do not look at all (gpt-oss), give one document a "
            "row",
            elsewhere=False,
        )
    if source and not any(masks.traced(x) for x in starts):
        source.checked = given


def _by_rows(query, key, value, rows, options):
    """Attention within documents. (out [b, s, h, d], lse [b, h, s]); tokens of none give 0."""
    b, h, s = query.shape[:3]
    out, lse = _packed_attention(query, key, value, rows, options)
    if rows.order_q is not None:
        out = torch.empty_like(out).index_copy(0, rows.order_q, out)
        lse = torch.empty_like(lse).index_copy(1, rows.order_q, lse)
    return out.view(b, s, h, -1), lse.view(h, b, s).transpose(0, 1)


def _packed_attention(query, key, value, rows, options):
    """(out [t, h, d], lse [h, t]) of the queries in the order of the rows."""
    flat = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
    orders = (rows.order_q, rows.order_k, rows.order_k)
    flat = [t if order is None else t.index_select(0, order) for t, order in zip(flat, orders)]
    return attention_varlen(*flat, rows.cu_q, rows.cu_k, **options)


def _with_later(out, lse, query, key, value, rows, options):
    """Attention of all tokens, joined with that of some of them over later keys. Each has its share
    of the sum of exponentials, which is what the log-sum-exp tells."""
    b, s, h, d = out.shape
    options = dict(options, causal=True, window_size=(-1, -1))
    more, more_lse = _packed_attention(query, key, value, rows, options)
    out, lse = out.reshape(b * s, h, d), lse.transpose(0, 1).reshape(h, b * s)
    these, these_lse = out.index_select(0, rows.order_q), lse.index_select(1, rows.order_q)
    share = torch.sigmoid(these_lse - more_lse)
    weight = share.transpose(0, 1)[..., None]
    joined = torch.lerp(more.float(), these.float(), weight).to(out.dtype)
    out = out.index_copy(0, rows.order_q, joined)
    lse = lse.index_copy(1, rows.order_q, torch.logaddexp(these_lse, more_lse))
    return out.view(b, s, h, d), lse.view(h, b, s).transpose(0, 1)
