# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for Hugging Face transformers.

    from sagebwd.integrations import transformers as sage
    sage.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="sagebwd")

Padding masks, packed sequences (``position_ids`` that start again, or ``cu_seq_lens_*``), sliding
windows, caches, grouped queries and attention sinks work as in the other implementations. Dropout,
soft capping and mask patterns of other kinds raise NotImplementedError.
"""

import os

import torch
import torch.nn.functional as F

from ..attention import attention, attention_varlen
from ..recipe import MATMULS, as_recipe

# Keywords that reach every attention call and do not concern it.
_HARMLESS = frozenset(
    "position_ids cache_position past_key_values use_cache output_hidden_states return_dict labels "
    "num_items_in_batch logits_to_keep num_logits_to_keep output_router_logits".split()
)


def register(name="sagebwd", *, recipe="vectorwise", backward="int8", exact_layers=(), packed=True):
    """Makes ``attn_implementation=name`` available, for attention and for masks. Returns the name.

    exact_layers
        Indices of layers whose matmuls all stay in floating point: a switch for layers that
        ``sagebwd.diagnose`` finds sensitive.
    packed
        Whether ``position_ids`` may hold several documents per row. Looking for them reads values,
        which breaks a compiled graph in two; False promises that there are none, and
        ``torch.compile(fullgraph=True)`` works. Offsets given as ``cu_seq_lens_*`` are always
        obeyed.

    Several names with different settings may be registered.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    int8 = dict(recipe=as_recipe(recipe), backward=backward)
    exact = dict(
        recipe=as_recipe(recipe).vectorwise(high_precision=tuple(MATMULS)), backward=backward
    )
    exact_layers = frozenset(exact_layers)

    def forward(module, query, key, value, attention_mask, **kwargs):
        layer = getattr(module, "layer_idx", None)
        settings = exact if layer in exact_layers else int8
        if not packed:
            kwargs.pop("position_ids", None)
        return _forward(settings, module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _mask)
    return name


def unregister(name="sagebwd"):
    """Takes a registered name back. Models that use it must be switched first."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


# --- masks ----------------------------------------------------------------------------------------

# Patterns that the attention call reproduces from is_causal, sliding_window and position_ids.
_PATTERNS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.",
    "sliding_window_bidirectional_overlay.",
    "packed_sequence_mask_function.",
)


def _leaves(function):
    """The names of the patterns a mask function is an intersection of."""
    if torch.compiler.is_compiling():
        return []  # a traced function cannot be looked into; _mask checks by other means
    name = function.__qualname__
    if name.startswith("and_masks."):
        parts = [
            c.cell_contents for c in function.__closure__ if isinstance(c.cell_contents, tuple)
        ]
        return [leaf for part in parts for f in part for leaf in _leaves(f)]
    return [name]


def _mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    **kwargs,
):
    """The padding mask [b, kv], or None without padding. Mask patterns are told to the attention
    call, not drawn."""
    kinds = _leaves(mask_function) if mask_function is not None else []
    if kwargs.get("use_vmap"):
        kinds = [*kinds, "a function of the caller"]
    elif not kinds and getattr(kwargs.get("config"), "attention_chunk_size", None) is not None:
        kinds = ["chunked_overlay"]
    for name in kinds:
        if not name.startswith(_PATTERNS):
            raise NotImplementedError(
                f"sagebwd: attention masks of the kind {name!r} are not supported"
            )
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    if attention_mask.shape[1] == kv_length and attention_mask.all():
        return None
    return attention_mask


# --- attention ------------------------------------------------------------------------------------


def _forward(
    settings,
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
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    output_attentions=False,
    **kwargs,
):
    """The call of transformers: query [b, h, s, d], result ([b, s, h, d], None)."""
    if dropout:
        raise NotImplementedError(f"sagebwd: attention dropout {dropout} is not supported")
    if softcap is not None:
        raise NotImplementedError("sagebwd: soft capping of logits is not supported")
    if output_attentions:
        raise NotImplementedError(
            "sagebwd: output_attentions is not supported; use the eager implementation"
        )
    for name, given in kwargs.items():
        if given is not None and name not in _HARMLESS:
            raise NotImplementedError(f"sagebwd: the attention keyword {name!r} is not supported")

    query, key, value = _one_dtype(query, key, value)
    d, dv = query.shape[-1], value.shape[-1]
    if dv < d:  # exact: channels of zeros, cut off again below
        value = F.pad(value, (0, d - dv))
    causal = bool(module.is_causal if is_causal is None else is_causal)
    options = dict(settings, causal=causal, softmax_scale=scaling, return_lse=True)
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, sliding_window - 1)
    if os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1":
        options["deterministic"] = True

    if attention_mask is not None:
        out, lse = _padded(query, key, value, attention_mask, options)
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        lengths = (
            _int32(cu_seq_lens_q),
            _int32(cu_seq_lens_k),
            _int(max_length_q),
            _int(max_length_k),
        )
        out, lse = _packed(query, key, value, *lengths, options)
    elif (starts := _document_starts(position_ids, query, key)) is not None:
        out, lse = _packed(query, key, value, starts, starts, None, None, options)
    else:
        out, lse = attention(query, key, value, layout="bhsd", **options)
        out = out.transpose(1, 2)
    if s_aux is not None:
        # A sink is a key without a value: it only takes its share of each row.
        share = torch.sigmoid(lse - s_aux.float().view(1, -1, 1)).transpose(1, 2)[..., None]
        out = out * share.to(out.dtype)
    return out[..., :dv].contiguous(), None


def _one_dtype(*tensors):
    """PEFT may leave queries and keys in float32 while the layer runs in 16 bit; the values have
    the layer's dtype."""
    dtype = tensors[-1].dtype
    return tuple(t.to(dtype) for t in tensors)


def _int32(t):
    return t.to(torch.int32)


def _int(n):
    return int(n) if n is not None else None


def _packed(query, key, value, cu_q, cu_k, max_q, max_k, options):
    """All rows of the batch as one row of documents. (out [b, s, h, d], lse [b, h, s])"""
    b, h, s, d = query.shape
    flat = [t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]) for t in (query, key, value)]
    out, lse = attention_varlen(*flat, cu_q, cu_k, max_q, max_k, **options)
    return out.view(b, s, h, d), lse.view(h, b, s).transpose(0, 1)


def _padded(query, key, value, mask, options):
    """Rows of real tokens as documents; padding gives 0."""
    if mask.dim() != 2:
        raise NotImplementedError(
            f"sagebwd: attention masks of shape {tuple(mask.shape)} are not supported"
        )
    b, h, s, d = query.shape
    mask = mask.bool()
    # A static cache is longer than what has been seen.
    key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
    mask_q = mask[:, -s:]
    where_q, where_k = (torch.nonzero(m.flatten()).flatten() for m in (mask_q, mask))
    rows = [t.transpose(1, 2).reshape(-1, t.shape[1], d) for t in (query, key, value)]
    packed = [r.index_select(0, w) for r, w in zip(rows, (where_q, where_k, where_k))]
    out, lse = attention_varlen(*packed, _offsets(mask_q), _offsets(mask), **options)
    full = out.new_zeros(b * s, h, d).index_copy(0, where_q, out)
    full_lse = lse.new_full((b * s, h), -torch.inf).index_copy(0, where_q, lse.transpose(0, 1))
    return full.view(b, s, h, d), full_lse.view(b, s, h).transpose(1, 2)


def _offsets(mask):
    return F.pad(mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


def _document_starts(position_ids, query, key):
    """Offsets of the documents of all rows together, or None if every row is one document."""
    b, _, s, _ = query.shape
    if position_ids is None or s == 1 or key.shape[2] != s:
        return None
    if (
        position_ids.dim() != 2
    ):  # several position axes, as vision models have: they do not tell documents
        return None
    first = torch.ones_like(position_ids, dtype=torch.bool)
    first[:, 1:] = position_ids.diff(dim=1) != 1
    if not first[:, 1:].any():
        return None
    starts = torch.nonzero(first.expand(b, s).flatten()).flatten()
    return _int32(F.pad(starts, (0, 1), value=b * s))
