# SPDX-License-Identifier: Apache-2.0
"""Attention under the names, argument orders, layouts and causal alignments of other libraries.

Each function takes exactly its original's arguments. A value this library does not support raises
NotImplementedError; nothing is accepted and ignored.
"""

from dataclasses import replace

import torch

from .attention import attention, attention_varlen
from .recipe import Recipe


def _refuse(**unsupported):
    """Raises for every argument that is not at the value which switches it off."""
    for name, (value, off) in unsupported.items():
        if value is not off and value != off:
            raise NotImplementedError(f"sagebwd: {name}={value!r} is not supported")


def _refuse_tensor(**unsupported):
    for name, value in unsupported.items():
        if value is not None:
            raise NotImplementedError(f"sagebwd: {name} is not supported")


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """FlashAttention's: q [b, s, h, d], causal mask at the bottom right. ``return_attn_probs``
    gives (out, lse, None) as the original does without dropout. ``deterministic=False`` follows
    PyTorch's global flag."""
    _refuse(dropout_p=(dropout_p, 0.0), softcap=(softcap, 0.0))
    _refuse_tensor(alibi_slopes=alibi_slopes)
    out, lse = attention(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        deterministic=deterministic or None,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """FlashAttention's packed form: q [t, h, d], int32 offsets, lse [h, t]."""
    _refuse(dropout_p=(dropout_p, 0.0), softcap=(softcap, 0.0))
    _refuse_tensor(alibi_slopes=alibi_slopes, block_table=block_table)
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
        deterministic=deterministic or None,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False):
    """SageAttention's, with gradients: q [b, h, s, d] (``"HND"``) or [b, s, h, d] (``"NHD"``). The
    original defines a causal mask only for as many keys as queries, and so does this."""
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(f"tensor_layout: expected 'HND' or 'NHD', got {tensor_layout!r}")
    tokens = 2 if tensor_layout == "HND" else 1
    if is_causal and q.shape[tokens] != k.shape[tokens]:
        raise NotImplementedError(
            "sageattn: is_causal needs as many keys as queries, got "
            f"{k.shape[tokens]} and {q.shape[tokens]}; sagebwd.attention takes align="
        )
    return attention(
        q,
        k,
        v,
        causal=is_causal,
        softmax_scale=sm_scale,
        layout="bhsd" if tensor_layout == "HND" else "bshd",
        return_lse=return_lse,
    )


def sageattn_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    is_causal=False,
    sm_scale=None,
    smooth_k=True,
):
    """SageAttention's packed form, with gradients: q [t, h, d]. A causal mask needs documents with
    as many keys as queries: the same offsets for both. Compiled code compares the longest lengths
    only."""
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
        recipe=replace(Recipe(), smooth_k=bool(smooth_k)),
    )


def _same_lengths(cu_q, cu_k, max_q, max_k):
    if cu_q is cu_k:
        return True
    # Values of a tensor are out of reach for a traced graph.
    return max_q == max_k and (torch.compiler.is_compiling() or torch.equal(cu_q, cu_k))


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """PyTorch's: [b, h, s, d] or [h, s, d], causal mask at the top left."""
    _refuse_tensor(attn_mask=attn_mask)
    _refuse(dropout_p=(dropout_p, 0.0))
    if query.dim() not in (3, 4):
        raise NotImplementedError(
            "scaled_dot_product_attention: expected 3 or 4 dimensions, "
            f"got shape {tuple(query.shape)}"
        )
    single = query.dim() == 3
    if single:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"scaled_dot_product_attention: {query.shape[1]} query heads and {key.shape[1]} key "
            "heads need enable_gqa=True"
        )
    out = attention(
        query, key, value, causal=is_causal, softmax_scale=scale, layout="bhsd", align="top_left"
    )
    return out.squeeze(0) if single else out
