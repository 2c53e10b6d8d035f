# SPDX-License-Identifier: Apache-2.0
"""The functions that users call: dense and packed attention, and whether a call can run."""

from typing import NamedTuple, Optional

import torch

from . import arguments, block_lists, ops
from .recipe import as_recipe

#: ``backward="bf16"`` takes these out of INT8. S', the logits rebuilt in the backward, is not among
#: them: P = exp(S' - lse) needs the logits that lse was computed from. With exact logits the errors
#: of dq and dk would double once logits are large.
BACKWARD_MATMULS = ("dV", "dP", "dQ", "dK")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYOUTS = ("bshd", "bhsd")


class Support(NamedTuple):
    """The answer of :func:`is_supported`: true or false in an ``if``, and the reason if false."""

    ok: bool
    reason: Optional[str] = None

    def __bool__(self):
        return self.ok


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    softmax_scale=None,
    window_size=(-1, -1),
    blocks=None,
    layout="bshd",
    align="bottom_right",
    recipe="vectorwise",
    backward="int8",
    deterministic=None,
    return_lse=False,
    return_max_logit=False,
):
    """Attention of q over k and v, with INT8 matmuls in the forward and the backward.

    q is [b, s, h, d] and k, v are [b, sk, hk, d] (``layout="bshd"``), or both with heads before
    tokens (``"bhsd"``). h is a multiple of hk (grouped queries). Tensors are read in place if their
    last stride is 1. The result has q's layout and dtype.

    causal, window_size, align
        Query i sees keys ``i + shift - left <= j <= i + shift + right``; -1 leaves a side open,
        ``causal`` sets right to 0. shift is ``sk - s`` for ``"bottom_right"`` (FlashAttention), 0
        for ``"top_left"`` (PyTorch). A query that sees no key gives 0.
    softmax_scale
        Of the logits; default ``1/sqrt(d)``.
    blocks
        :class:`sagebwd.BlockLists`: the key blocks that each block of queries sees (block-sparse
        attention). The mask acts inside them.
    recipe
        ``"vectorwise"``, ``"paper"`` or a :class:`sagebwd.Recipe`.
    backward
        ``"int8"``, or ``"bf16"`` to run every matmul that makes a gradient in floating point. The
        backward rebuilds the logits in INT8 as the forward did
        (``Recipe(high_precision=("S", "S'"))`` lifts both).
    deterministic
        Makes dq bit-equal from run to run; out, dk and dv always are. None follows
        ``torch.use_deterministic_algorithms``.
    return_lse
        Also return the log-sum-exp of the scaled logits, float32 [b, h, s]. Gradients flow through
        it.
    return_max_logit
        Also return the largest scaled logit, float32 [b, h]. Above about 30, expect errors to grow.

    Under autocast, inputs are cast to its dtype. On the meta device only shapes are computed.
    Raises TypeError or ValueError for arguments that make no sense or contradict each other, and
    NotImplementedError for what is not supported.
    """
    return_lse = arguments.flag("return_lse", return_lse)
    return_max_logit = arguments.flag("return_max_logit", return_max_logit)
    options = attention_options(causal, softmax_scale, window_size, align, recipe, backward)
    switches = dict(
        deterministic=is_deterministic(deterministic),
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        save_codes=as_recipe(recipe).save_codes,
        tokens_first=layout == "bshd",
    )
    # Most calls need nothing more. Where this one does, the checks say what is wrong with it.
    results = None
    if blocks is None and layout in _LAYOUTS:
        results = ops.attend(q, k, v, options, **switches)
    if results is None:
        tokens_first = check_dense(q, k, v, layout)
        if blocks is not None:
            options = _with_lists(options, blocks, *ops.swapped(tokens_first, q, k), packed=False)
        results = ops.forward(*readable(q, k, v), options, **switches)
    return _results(*results, return_lse, return_max_logit)


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    causal=False,
    softmax_scale=None,
    window_size=(-1, -1),
    blocks=None,
    align="bottom_right",
    recipe="vectorwise",
    backward="int8",
    deterministic=None,
    return_lse=False,
    return_max_logit=False,
):
    """Attention within the documents of a packed batch: q [t, h, d], k and v [tk, hk, d].

    Document i holds tokens ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]`` and the keys between
    the same entries of ``cu_seqlens_k``: int32 tensors of equal length. Documents may be empty.
    Tokens after the last offset belong to no document and give 0; so do all tokens if 0 is the only
    offset. ``max_seqlen_*``, if given, must not be too small. The log-sum-exp is [h, t], the
    largest logit [documents, h]. The rest is as in :func:`attention`.

    Offsets on the CPU are checked. Offsets on q's GPU are read there: the call waits for nothing
    and can be captured into a CUDA graph, whose replay takes the offsets it finds. Such offsets
    cannot be checked, and ``max_seqlen_*`` is ignored. Wrong ones do no harm: a document starts no
    earlier than the one before it and ends within the tensors. Calls that only the plain kernels
    serve (float32, head dims above 128, …) copy the offsets to the CPU and wait for them.
    """
    return_lse = arguments.flag("return_lse", return_lse)
    return_max_logit = arguments.flag("return_max_logit", return_max_logit)
    options, (q, k, v) = _packed(
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
        blocks,
    )
    out, lse, max_logit = ops.forward(
        q,
        k,
        v,
        options,
        deterministic=is_deterministic(deterministic),
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        save_codes=as_recipe(recipe).save_codes,
    )
    return _results(out, lse, max_logit, return_lse, return_max_logit)


def is_supported(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    causal=False,
    softmax_scale=None,
    window_size=(-1, -1),
    blocks=None,
    layout="bshd",
    align="bottom_right",
    recipe="vectorwise",
    backward="int8",
):
    """Whether :func:`attention` (or, with ``cu_seqlens_*``, :func:`attention_varlen`) would run
    these arguments, forward and backward. A false answer has the reason that the call would
    raise."""
    try:
        if cu_seqlens_q is None and cu_seqlens_k is None:
            options, tensors = _dense(
                q, k, v, causal, softmax_scale, window_size, layout, align, recipe, backward, blocks
            )
        else:
            options, tensors = _packed(
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
                blocks,
            )
        if q.device.type == "meta":
            return Support(True)  # shapes are all that is computed there
        for is_backward in (False, True):
            answers = ops.explain(*tensors, options, is_backward=is_backward)
            if not any(state == "chosen" for _, state, _ in answers):
                return Support(False, "; ".join(f"{name}: {why}" for name, _, why in answers))
    except (TypeError, ValueError, NotImplementedError) as error:
        return Support(False, str(error))
    return Support(True)


# --- arguments ------------------------------------------------------------------------------------


def _dense(
    q, k, v, causal, softmax_scale, window_size, layout, align, recipe, backward, blocks=None
):
    """Operator options and q, k, v as [b, h, n, d]."""
    q, k, v = dense_tensors(q, k, v, layout)
    options = attention_options(causal, softmax_scale, window_size, align, recipe, backward)
    return _with_lists(options, blocks, q, k, packed=False), readable(q, k, v)


def dense_tensors(q, k, v, layout):
    """q, k, v as [b, h, n, d], or the error that says why they do not fit together."""
    return ops.swapped(check_dense(q, k, v, layout), q, k, v)


def check_dense(q, k, v, layout):
    """Whether the layout has tokens before heads. Raises unless q, k, v fit together."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
    check_tensors(q, k, v, dims=4)
    shape, keys = q.shape, k.shape  # that of v too
    if keys[0] != shape[0]:
        raise ValueError(
            f"q, k, v: expected one batch size, got {shape[0]}, {keys[0]}, {v.shape[0]}"
        )
    tokens_first = layout == "bshd"
    heads = 2 if tokens_first else 1
    check_heads(shape[heads], keys[heads])
    return tokens_first


def _packed(
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
):
    """Operator options and q, k, v as [t, h, d]."""
    check_tensors(q, k, v, dims=3)
    check_heads(q.shape[1], k.shape[1])
    _check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    _check_offsets("cu_seqlens_k", cu_seqlens_k, q)
    options = attention_options(causal, softmax_scale, window_size, align, recipe, backward)
    options = options._replace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=_length("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=_length("max_seqlen_k", max_seqlen_k),
    )
    return _with_lists(options, blocks, q, k, packed=True), readable(q, k, v)


def check_tensors(q, k, v, dims):
    """Raises unless q, k, v are tensors that fit together and of a kind that is supported."""
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
    d, d_k = q.shape[-1], k.shape[-1]
    if d_k != d:
        raise ValueError(f"head dim: expected one for q and k, got {d} and {d_k}")
    if v.shape[-1] != d:
        raise NotImplementedError(f"head dim of v: expected that of q ({d}), got {v.shape[-1]}")
    if d % 8 != 0 or d < 8 or d > 256:
        raise NotImplementedError(f"head dim: expected a multiple of 8 from 8 to 256, got {d}")
    if k.shape != v.shape:
        raise ValueError(f"k, v: expected one shape, got {tuple(k.shape)} and {tuple(v.shape)}")


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


def check_heads(heads, kv_heads):
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"heads: expected q's to be a multiple of k's, got {heads} and {kv_heads}")


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
    )


def _with_lists(options, blocks, q, k, packed):
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


def _results(out, lse, max_logit, return_lse, return_max_logit):
    if return_lse and return_max_logit:
        return out, lse, max_logit
    if return_lse:
        return out, lse
    if return_max_logit:
        return out, max_logit
    return out
