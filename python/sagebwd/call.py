# SPDX-License-Identifier: Apache-2.0
"""The arguments of an attention call: checked, and in the form that the operators take."""

import torch

from . import arguments, block_lists, padding, sharded
from ._ops import attention as ops
from .recipe import as_recipe

#: ``backward="bf16"`` takes these out of INT8. S', the logits rebuilt in the backward, is not among
#: them: P = exp(S' - lse) needs the logits that lse was computed from. With exact logits the errors
#: of dq and dk would double once logits are large.
BACKWARD_MATMULS = ("dV", "dP", "dQ", "dK")

LAYOUTS = ("bshd", "bhsd")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dense(
    q,
    k,
    v,
    causal,
    softmax_scale,
    window_size,
    layout,
    align,
    recipe,
    backward,
    blocks=None,
    softcap=None,
):
    """Operator options and q, k, v as [b, h, n, d]."""
    q, k, v = ops.swapped(check_dense(q, k, v, layout, any_head_dim=True), q, k, v)
    options = attention_options(
        causal, softmax_scale, window_size, align, recipe, backward, softcap
    )
    return with_lists(options, blocks, q, k, packed=False), readable(q, k, v)


def dense_tensors(q, k, v, layout):
    """q, k, v as [b, h, n, d], or the error that says why they do not fit together."""
    return ops.swapped(check_dense(q, k, v, layout), q, k, v)


def check_dense(q, k, v, layout, any_head_dim=False):
    """Whether the layout has tokens before heads. Raises unless q, k, v fit together."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
    check_tensors(q, k, v, 4, any_head_dim)
    shape, keys = q.shape, k.shape  # that of v too
    if keys[0] != shape[0]:
        raise ValueError(
            f"q, k, v: expected one batch size, got {shape[0]}, {keys[0]}, {v.shape[0]}"
        )
    tokens_first = layout == "bshd"
    heads = 2 if tokens_first else 1
    check_heads(shape[heads], keys[heads], layout, shape)
    return tokens_first


def packed(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal,
    softmax_scale,
    window_size,
    align,
    recipe,
    backward,
    blocks=None,
    softcap=None,
):
    """Operator options and q, k, v as [t, h, d]."""
    check_tensors(q, k, v, 3, any_head_dim=True)
    check_heads(q.shape[1], k.shape[1])
    _check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    _check_offsets("cu_seqlens_k", cu_seqlens_k, q)
    options = attention_options(
        causal, softmax_scale, window_size, align, recipe, backward, softcap
    )
    options = options._replace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=_length("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=_length("max_seqlen_k", max_seqlen_k),
    )
    return with_lists(options, blocks, q, k, packed=True), readable(q, k, v)


def check_tensors(q, k, v, dims, any_head_dim=False):
    """Raises unless q, k, v are tensors that fit together and of a kind that is supported.
    ``any_head_dim``: of those that padding.py takes, not only of those of the operators."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
        if t.is_nested or t.layout != torch.strided:
            kind = "a nested tensor" if t.is_nested else t.layout
            raise NotImplementedError(
                f"{name}: expected a dense tensor, got {kind}; use .to_dense(), or give the "
                "values() and offsets() of a jagged tensor to attention_varlen"
            )
        if t.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(t.shape)}")
        if t.dtype not in _DTYPES:
            raise NotImplementedError(
                f"{name}: expected float32, bfloat16 or float16, got {t.dtype}"
            )
        if t is not q and t.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device}, got {t.device}")
    d, d_k, d_v = q.shape[-1], k.shape[-1], v.shape[-1]
    if d_k != d:
        raise ValueError(f"head dim: expected one for q and k, got {d} and {d_k}")
    if any_head_dim:
        for name, size in (("head dim", d), ("head dim of v", d_v)):
            if size < 1 or size > padding.LARGEST:
                raise NotImplementedError(
                    f"{name}: expected 1 to {padding.LARGEST}, got {size}; use more heads of fewer "
                    "channels"
                )
    else:
        if d_v != d:
            raise NotImplementedError(f"head dim of v: expected that of q ({d}), got {d_v}")
        if d % 8 != 0 or d < 8 or d > padding.LARGEST:
            raise NotImplementedError(
                f"head dim: expected a multiple of 8 from 8 to {padding.LARGEST}, got {d}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            "k, v: expected one shape but for the head dim, got "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    sharded.refuse(q)


def _check_offsets(name, cu, q):
    if not isinstance(cu, torch.Tensor):
        raise TypeError(f"{name}: expected a one-dimensional int32 tensor, got {type(cu).__name__}")
    if cu.dtype != torch.int32 or cu.dim() != 1:
        raise ValueError(
            f"{name}: expected a one-dimensional int32 tensor (.int() makes it one), "
            f"got {cu.dtype} {tuple(cu.shape)}"
        )
    if cu.device != q.device and cu.device.type != "cpu":
        raise ValueError(f"{name}: expected q's device {q.device} or the CPU, got {cu.device}")


def check_heads(heads, kv_heads, layout=None, shape=(0, 0, 0)):
    """Raises unless the heads of q are a multiple of those of k. ``shape`` is that of q."""
    if kv_heads == 0 or heads % kv_heads != 0:
        hint = ""
        if layout == "bshd" and looks_transposed(shape[1], shape[2]):
            hint = "; for q of shape [b, h, s, d] pass layout='bhsd'"
        raise ValueError(
            f"heads: expected q's to be a multiple of k's, got {heads} and {kv_heads}{hint}"
        )


def looks_transposed(tokens, heads):
    """Whether a call in the layout [b, s, h, d] is more likely one of [b, h, s, d]: no model has so
    many heads, and more of them than tokens. One token, as in decoding, has fewer."""
    return heads > 256 and heads > 4 * tokens


def _length(name, value):
    """A longest length for the operator; -1 stands for "not given"."""
    if value is None:
        return -1
    return arguments.integer(name, value, 0, 2**63 - 1, "a length, or None if not known")


def attention_options(
    causal=False,
    softmax_scale=None,
    window_size=(-1, -1),
    align="bottom_right",
    recipe="vectorwise",
    backward="int8",
    softcap=None,
):
    """The operator options of arguments of :func:`attention`."""
    if align not in ("bottom_right", "top_left"):
        raise ValueError(f"align: expected 'bottom_right' or 'top_left', got {align!r}")
    if backward not in ("int8", "bf16"):
        raise ValueError(f"backward: expected 'int8' or 'bf16', got {backward!r}")
    left, right = arguments.window("window_size", window_size)
    recipe = as_recipe(recipe)
    return ops.Options(
        softmax_scale=arguments.scale("softmax_scale", softmax_scale),
        causal=arguments.flag("causal", causal),
        top_left=align == "top_left",
        window_left=left,
        window_right=right,
        recipe=recipe.text(BACKWARD_MATMULS if backward == "bf16" else ()),
        seed=recipe.seed,
        softcap=arguments.softcap(softcap),
    )


def with_lists(options, blocks, q, k, packed):
    if blocks is None:
        return options
    block_lists.check(blocks, q, k, packed)
    return options._replace(
        list_index=blocks.index,
        list_count=blocks.count,
        block_q=blocks.block_q,
        block_k=blocks.block_k,
        lead=blocks.lead,
    )


def readable(q, k, v):
    """q, k, v in autocast's dtype, with the channels next to each other."""
    device = "cuda" if q.is_cuda else q.device.type  # the name of a type takes longer
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return q, k, v
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))


def is_deterministic(flag):
    """What ``deterministic=`` says, or else PyTorch's switch."""
    if flag is None:
        return torch.are_deterministic_algorithms_enabled()
    return arguments.flag("deterministic", flag)
