# SPDX-License-Identifier: Apache-2.0
"""Attention under the names, argument orders, layouts and causal alignments of other libraries.

Each function takes exactly its original's arguments; those of FlashAttention also its later names
for attention sinks, ``s_aux`` (3) and ``learnable_sink`` (4), and a ``recipe``, which is ours. A
value this library does not support raises NotImplementedError; nothing is accepted and ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import arguments
from .attention import attention, attention_varlen
from .masks import attention_with_mask
from .recipe import Recipe, as_recipe

_REMEDIES = {
    "dropout_p": "pass 0.0 (dropout outside of attention may stay)",
    "alibi_slopes": "pass None and use positions that are part of q and k, such as rotary ones",
    "block_table": "gather the pages into one tensor of keys and one of values first",
    "rotary_cos": "rotate q and k before the call and pass None",
    "rotary_sin": "rotate q and k before the call and pass None",
    "num_splits": "pass 0, which leaves it to the library",
}


def refuse(**unsupported):
    """Raises for every argument whose value is not the one that switches it off."""
    for name, (value, off) in unsupported.items():
        if isinstance(value, torch.Tensor) or (value is not off and value != off):
            shown = "" if isinstance(value, torch.Tensor) else f"={value!r}"
            raise NotImplementedError(f"sagebwd: {name}{shown} is not supported; {_REMEDIES[name]}")


def sinks_of(s_aux, learnable_sink):
    """The sinks of a call: FlashAttention 3 and 4 have a name each for them."""
    if s_aux is not None and learnable_sink is not None:
        raise ValueError("s_aux, learnable_sink: expected one of them, two names of one argument")
    return learnable_sink if s_aux is None else s_aux


def _unpacked(name, packed, axis, parts):
    """The tensors that are stacked along an axis, as views of one unbind: autograd then stacks
    their gradients once."""
    dims = axis + 3
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(packed).__name__}")
    if packed.dim() != dims or packed.shape[axis] != parts:
        shape = "[batch, tokens, " if axis == 2 else "[tokens, "
        raise ValueError(
            f"{name}: expected {shape}{parts}, heads, head dim], got {tuple(packed.shape)}"
        )
    return packed.unbind(axis)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    recipe: str | Recipe = "vectorwise",
) -> Any:
    """FlashAttention's: q [b, s, h, d], causal mask at the bottom right. ``return_attn_probs``
    gives (out, lse, None) as the original does without dropout. ``deterministic=False`` follows
    PyTorch's global flag."""
    refuse(dropout_p=(dropout_p, 0.0), alibi_slopes=(alibi_slopes, None))
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    out, lse = attention(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks_of(s_aux, learnable_sink),
        recipe=recipe,
        deterministic=deterministic or None,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    recipe: str | Recipe = "vectorwise",
) -> Any:
    """FlashAttention's packed form: q [t, h, d], int32 offsets, lse [h, t]."""
    refuse(
        dropout_p=(dropout_p, 0.0),
        alibi_slopes=(alibi_slopes, None),
        block_table=(block_table, None),
    )
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    out, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks_of(s_aux, learnable_sink),
        recipe=recipe,
        deterministic=deterministic or None,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    recipe: str | Recipe = "vectorwise",
) -> Any:
    """FlashAttention's with q, k and v stacked: qkv [b, s, 3, h, d]."""
    return flash_attn_func(
        *_unpacked("qkv", qkv, 2, 3),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        recipe=recipe,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    recipe: str | Recipe = "vectorwise",
) -> Any:
    """FlashAttention's with k and v stacked: kv [b, sk, 2, hk, d]."""
    return flash_attn_func(
        q,
        *_unpacked("kv", kv, 2, 2),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        recipe=recipe,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    recipe: str | Recipe = "vectorwise",
) -> Any:
    """FlashAttention's packed form with q, k and v stacked: qkv [t, 3, h, d]."""
    return flash_attn_varlen_func(
        *_unpacked("qkv", qkv, 1, 3),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        recipe=recipe,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    recipe: str | Recipe = "vectorwise",
) -> Any:
    """FlashAttention's packed form with k and v stacked: kv [tk, 2, hk, d]."""
    return flash_attn_varlen_func(
        q,
        *_unpacked("kv", kv, 1, 2),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        recipe=recipe,
    )


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: Tensor | None = None,
    smooth_k: bool = True,
    recipe: str | Recipe = "vectorwise",
) -> Any:
    """SageAttention's, with gradients: q [b, h, s, d] (``"HND"``) or [b, s, h, d] (``"NHD"``).
    ``smooth_k=False`` switches that of the recipe off. The original defines a causal
    mask only for as many keys as queries, and so does this. An attn_mask has the form that
    :func:`torch.nn.functional.scaled_dot_product_attention` takes. It may describe padding, a
    causal mask, a window, documents or few sets of queries that see the same keys. Its values are
    read, so a GPU is waited for."""
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(f"tensor_layout: expected 'HND' or 'NHD', got {tensor_layout!r}")
    is_causal = arguments.flag("is_causal", is_causal)
    return_lse = arguments.flag("return_lse", return_lse)
    tokens = 2 if tensor_layout == "HND" else 1
    if is_causal and q.shape[tokens] != k.shape[tokens]:
        raise NotImplementedError(
            "sageattn: is_causal needs as many keys as queries, got "
            f"{k.shape[tokens]} and {q.shape[tokens]}; sagebwd.attention takes align="
        )
    recipe = _smoothing(recipe, smooth_k)
    if attn_mask is None:
        return attention(
            q,
            k,
            v,
            causal=is_causal,
            softmax_scale=sm_scale,
            layout="bhsd" if tensor_layout == "HND" else "bshd",
            recipe=recipe,
            return_lse=return_lse,
        )
    turn = (lambda t: t) if tensor_layout == "HND" else (lambda t: t.transpose(1, 2))
    out, lse = attention_with_mask(
        *(turn(q), turn(k), turn(v), attn_mask),
        is_causal=is_causal,
        softmax_scale=sm_scale,
        recipe=recipe,
    )
    return (turn(out), lse) if return_lse else turn(out)


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    *,
    recipe: str | Recipe = "vectorwise",
) -> Tensor:
    """SageAttention's packed form, with gradients: q [t, h, d]. With a causal mask, every document
    needs as many keys as queries, that is, the offsets must be the same. Compiled code cannot read
    the offsets and compares only the longest lengths."""
    is_causal = arguments.flag("is_causal", is_causal)
    if is_causal and not _same_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        raise NotImplementedError(
            "sageattn_varlen: is_causal needs documents with as many keys as queries; "
            "sagebwd.attention_varlen takes align="
        )
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=is_causal,
        softmax_scale=sm_scale,
        recipe=_smoothing(recipe, smooth_k),
    )


def _smoothing(recipe, smooth_k):
    recipe = as_recipe(recipe)
    return recipe if arguments.flag("smooth_k", smooth_k) else replace(recipe, smooth_k=False)


def _same_lengths(cu_q, cu_k, max_q, max_k):
    if cu_q is cu_k:
        return True
    # A traced graph cannot read the values of a tensor.
    return max_q == max_k and (torch.compiler.is_compiling() or torch.equal(cu_q, cu_k))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's: [b, h, s, d] or [h, s, d], causal mask at the top left. An attn_mask may describe
    padding, a causal mask, a window, documents or few sets of queries that see the same keys. Its
    values are read, so a GPU is waited for."""
    refuse(dropout_p=(dropout_p, 0.0))
    is_causal = arguments.flag("is_causal", is_causal)
    if query.dim() not in (3, 4):
        raise NotImplementedError(
            "scaled_dot_product_attention: expected 3 or 4 dimensions, "
            f"got shape {tuple(query.shape)}"
        )
    single = query.dim() == 3
    if single:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if not arguments.flag("enable_gqa", enable_gqa) and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"scaled_dot_product_attention: {query.shape[1]} query heads and {key.shape[1]} key "
            "heads need enable_gqa=True"
        )
    if attn_mask is not None:
        out, _ = attention_with_mask(
            query, key, value, attn_mask, is_causal=is_causal, softmax_scale=scale
        )
    else:
        out = attention(
            *(query, key, value),
            causal=is_causal,
            softmax_scale=scale,
            layout="bhsd",
            align="top_left",
        )
    return out.squeeze(0) if single else out
