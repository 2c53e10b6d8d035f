# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's call for decoding, over a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import arguments
from . import sinks as sink_logits
from .attention import attention, attention_varlen
from .call import check_heads, check_tensors
from .drop_ins import refuse, sinks_of
from .recipe import Recipe, as_recipe


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: int | Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    recipe: str | Recipe = "vectorwise",
) -> Any:
    """FlashAttention's function for decoding: q [b, s, h, d] over caches [b, length, hk, d]. Row i
    of a cache holds the tokens from ``cache_leftpad[i]`` up to ``cache_seqlens[i]``. k and v, if
    given, are first written after them, in place. Causal masks and windows are aligned at the
    bottom right.

    Like the original it has no backward. Rotary embeddings and paged caches are refused.
    ``rotary_interleaved`` is accepted, because it has no effect without rotary embeddings.
    A token gets the bits that the whole sequence at once would give it (docs/causality.md), unless
    ``recipe``, which is ours, is ``"paper"``.
    """
    refuse(
        rotary_cos=(rotary_cos, None),
        rotary_sin=(rotary_sin, None),
        block_table=(block_table, None),
        alibi_slopes=(alibi_slopes, None),
        num_splits=(num_splits, 0),
    )
    # Everything is checked before the cache is written to.
    options = dict(
        causal=arguments.flag("causal", causal),
        softmax_scale=arguments.scale("softmax_scale", softmax_scale),
        window_size=arguments.window("window_size", window_size),
        softcap=arguments.softcap(softcap),
        sinks=sinks_of(s_aux, learnable_sink),
        recipe=as_recipe(recipe),
        return_lse=True,
    )
    return_softmax_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    check_tensors(q, k_cache, v_cache, 4, any_head_dim=True)
    check_heads(q.shape[2], k_cache.shape[2])
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise ValueError(f"k_cache, v_cache: expected q's {q.dtype}, got {k_cache.dtype}")
    if options["sinks"] is not None:
        sink_logits.check(options["sinks"], q.shape[2], q.device)
    _refuse_gradients(q, k_cache, v_cache, k, v, options["sinks"])
    b, capacity = q.shape[0], k_cache.shape[1]
    rows = _rows(cache_batch_idx, b, k_cache.shape[0], q.device)
    new = _new_tokens(k, v, k_cache, v_cache, b, cache_seqlens)
    lengths = _lengths("cache_seqlens", cache_seqlens, capacity, capacity - new, b)
    starts = _lengths("cache_leftpad", cache_leftpad, 0, capacity, b)

    if isinstance(lengths, int) and isinstance(starts, int):
        end = lengths + new
        if new:
            k_cache[rows, lengths:end], v_cache[rows, lengths:end] = k, v
        keys, values = k_cache[rows, starts:end], v_cache[rows, starts:end]
        out, lse = attention(q, keys, values, **options)
    else:
        lengths, starts = (_tensor(t, b, q.device) for t in (lengths, starts))
        if new:
            to = lengths[:, None] + torch.arange(new, device=q.device)
            row = torch.arange(k_cache.shape[0], device=q.device)[rows][:, None]
            k_cache[row, to], v_cache[row, to] = k, v
        out, lse = _ragged(q, k_cache[rows], v_cache[rows], starts, lengths + new, options)
    return (out, lse) if return_softmax_lse else out


def _ragged(q, k, v, starts, ends, options):
    """Rows of different lengths, read in place. Each row becomes three documents: its tokens, and
    the unused keys before and after them, which get no query."""
    b, s, capacity = q.shape[0], q.shape[1], k.shape[1]
    row = torch.arange(b, device=q.device)[:, None]
    keys = torch.stack([starts, torch.maximum(starts, ends), torch.full_like(ends, capacity)], 1)
    queries = torch.tensor([0, s, s], device=q.device)
    offsets = (
        F.pad((row * size + t).flatten(), (1, 0)).int()
        for size, t in ((s, queries), (capacity, keys))
    )
    flat = (t.flatten(0, 1) for t in (q, k, v))
    out, lse = attention_varlen(*flat, *offsets, **options)
    return out.view(b, s, *out.shape[1:]), lse.view(q.shape[2], b, s).transpose(0, 1)


def _refuse_gradients(*tensors):
    wanted = any(t is not None and t.requires_grad for t in tensors)
    if wanted and torch.is_grad_enabled():
        raise NotImplementedError(
            "flash_attn_with_kvcache: it has no backward; call it under torch.no_grad(), or use "
            "flash_attn_func to train"
        )


def _rows(cache_batch_idx, b, cached, device):
    """The rows of the cache that belong to those of q."""
    if cache_batch_idx is None:
        if cached != b:
            raise ValueError(
                f"k_cache: expected q's batch size {b}, or cache_batch_idx, got {cached}"
            )
        return slice(None)
    if cache_batch_idx.shape != (b,) or cache_batch_idx.dtype != torch.int32:
        raise ValueError(
            f"cache_batch_idx: expected int32 of shape {(b,)}, got {cache_batch_idx.dtype} "
            f"{tuple(cache_batch_idx.shape)}"
        )
    if cache_batch_idx.device.type == "cpu" and (cache_batch_idx < 0).any():
        raise ValueError(
            f"cache_batch_idx: expected rows from 0 to {cached - 1}, got {cache_batch_idx.tolist()}"
        )
    return cache_batch_idx.to(device, torch.int64)


def _new_tokens(k, v, k_cache, v_cache, b, cache_seqlens):
    """How many tokens are written."""
    if k is None and v is None:
        return 0
    if k is None or v is None:
        raise ValueError("k, v: expected both or neither")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: expected where to write k and v in the cache, got None")
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (b, k.shape[1], *cache.shape[2:])
        if tuple(t.shape) != expected or t.dtype != cache.dtype or t.device != cache.device:
            raise ValueError(
                f"{name}: expected {expected} of the cache's {cache.dtype} on {cache.device}, got "
                f"{tuple(t.shape)} of {t.dtype} on {t.device}"
            )
    return k.shape[1]


def _lengths(name, value, default, most, b):
    """One length for all rows, or an int32 tensor of them; checked if that needs no waiting."""
    if value is None:
        return default
    if not isinstance(value, torch.Tensor):
        return arguments.integer(name, value, 0, most, f"a length from 0 to {most} or a tensor")
    if value.shape != (b,) or value.dtype != torch.int32:
        raise ValueError(
            f"{name}: expected int32 of shape {(b,)}, got {value.dtype} {tuple(value.shape)}"
        )
    if value.device.type == "cpu" and ((value < 0) | (value > most)).any():
        raise ValueError(f"{name}: expected lengths from 0 to {most}, got {value.tolist()}")
    return value


def _tensor(lengths, b, device):
    if isinstance(lengths, torch.Tensor):
        return lengths.to(device, torch.int64)
    return torch.full((b,), lengths, device=device)
