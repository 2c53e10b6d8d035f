# SPDX-License-Identifier: Apache-2.0
"""The functions that users call: dense and packed attention, and whether a call can run."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor

from . import arguments, padding, sharded
from . import sinks as sink_logits
from ._ops import attention as ops
from .block_lists import BlockLists
from .call import (  # noqa: F401  (other modules find them here)
    BACKWARD_MATMULS,
    LAYOUTS,
    attention_options,
    check_dense,
    check_heads,
    check_tensors,
    dense,
    dense_tensors,
    is_deterministic,
    looks_transposed,
    packed,
    readable,
    with_lists,
)
from .recipe import Recipe, as_recipe

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Common(TypedDict, total=False):
        causal: bool
        softmax_scale: float | None
        window_size: tuple[int | None, int | None]
        softcap: float | None
        sinks: Tensor | None
        blocks: BlockLists | None
        align: Literal["bottom_right", "top_left"]
        recipe: str | Recipe
        backward: Literal["int8", "bf16"]
        deterministic: bool | None

    class _Dense(_Common, total=False):
        layout: Literal["bshd", "bhsd"]

    _No = Literal[False]


class Support(NamedTuple):
    """The answer of :func:`is_supported`: true or false in an ``if``, and the reason if false."""

    ok: bool
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.ok


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: _No = ...,
    return_max_logit: _No = ...,
    **options: Unpack[_Dense],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[_Dense],
) -> Any: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
    blocks: BlockLists | None = None,
    layout: str = "bshd",
    align: str = "bottom_right",
    recipe: str | Recipe = "vectorwise",
    backward: str = "int8",
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **unknown: NoReturn,
) -> Any:
    """Attention of q over k and v, with INT8 matmuls in the forward and the backward.

    q is [b, s, h, d] and k, v are [b, sk, hk, d] (``layout="bshd"``), or both with heads before
    tokens (``"bhsd"``). h is a multiple of hk (grouped queries). Head dims go to 256, and v may
    have another one than q and k, which the result takes over. Tensors are read in place if their
    last stride is 1 and head dims are multiples of 8 (on a GPU 16-bit ones up to 128 have to be
    equal, too); others are copied. The result has q's layout and dtype.

    causal, window_size, align
        Query i sees keys ``i + shift - left <= j <= i + shift + right``; -1 leaves a side open,
        ``causal`` sets right to 0. shift is ``sk - s`` for ``"bottom_right"`` (FlashAttention), 0
        for ``"top_left"`` (PyTorch). A query that sees no key gives 0.
    softmax_scale
        Of the logits; default ``1/sqrt(d)``.
    softcap
        A scaled logit x becomes ``softcap * tanh(x / softcap)`` (Gemma 2). None or 0: it stays x.
        The log-sum-exp and the largest logit are of the capped logits; sinks are not capped.
    sinks
        One logit per head [h] that joins every softmax and has no value (gpt-oss). Gradients flow
        into it. A query that sees no key gives 0, and its log-sum-exp is the sink.
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
    if unknown:
        _refuse_unknown("attention", unknown)
    return_lse = arguments.flag("return_lse", return_lse)
    return_max_logit = arguments.flag("return_max_logit", return_max_logit)
    options = attention_options(
        causal, softmax_scale, window_size, align, recipe, backward, softcap
    )
    tokens_first = layout == "bshd"
    switches = dict(
        deterministic=is_deterministic(deterministic),
        return_lse=return_lse or sinks is not None,
        return_max_logit=return_max_logit,
        save_codes=as_recipe(recipe).save_codes,
        tokens_first=tokens_first,
    )
    sharded.refuse(q)
    # Most calls need nothing more. Where this one does, the checks say what is wrong with it.
    results = None
    if blocks is None and layout in LAYOUTS:
        results = ops.attend(q, k, v, options, **switches)
    if results is None:
        check_dense(q, k, v, layout, any_head_dim=True)
        if blocks is not None:
            options = with_lists(options, blocks, *ops.swapped(tokens_first, q, k), packed=False)
        results = padding.forward(*readable(q, k, v), options, **switches)
    if tokens_first and q.size(2) > 256:
        _doubt_layout(q.shape)
    out, lse, max_logit = results
    if sinks is not None:
        sink_logits.check(sinks, q.shape[2 if tokens_first else 1], q.device)
        out, lse = sink_logits.add(out, lse, sinks, tokens_first)
    return _results(out, lse, max_logit, return_lse, return_max_logit)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: _No = ...,
    return_max_logit: _No = ...,
    **options: Unpack[_Common],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[_Common],
) -> Any: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
    blocks: BlockLists | None = None,
    align: str = "bottom_right",
    recipe: str | Recipe = "vectorwise",
    backward: str = "int8",
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **unknown: NoReturn,
) -> Any:
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
    if unknown:
        _refuse_unknown("attention_varlen", unknown)
    return_lse = arguments.flag("return_lse", return_lse)
    return_max_logit = arguments.flag("return_max_logit", return_max_logit)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    how = (causal, softmax_scale, window_size, align, recipe, backward, blocks, softcap)
    options, (q, k, v) = packed(q, k, v, *offsets, *how)
    if sinks is not None:
        sink_logits.check(sinks, q.shape[1], q.device)
    out, lse, max_logit = padding.forward(
        q,
        k,
        v,
        options,
        deterministic=is_deterministic(deterministic),
        return_lse=return_lse or sinks is not None,
        return_max_logit=return_max_logit,
        save_codes=as_recipe(recipe).save_codes,
    )
    if sinks is not None:
        out, lse = sink_logits.add(out, lse, sinks)
    return _results(out, lse, max_logit, return_lse, return_max_logit)


def is_supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
    blocks: BlockLists | None = None,
    layout: str = "bshd",
    align: str = "bottom_right",
    recipe: str | Recipe = "vectorwise",
    backward: str = "int8",
    **unknown: NoReturn,
) -> Support:
    """Whether :func:`attention` (or, with ``cu_seqlens_*``, :func:`attention_varlen`) would run
    these arguments, forward and backward. A false answer has the reason that the call would
    raise."""
    if unknown:
        _refuse_unknown("is_supported", unknown)
    how = (causal, softmax_scale, window_size)
    try:
        if cu_seqlens_q is None and cu_seqlens_k is None:
            settings = (*how, layout, align, recipe, backward, blocks, softcap)
            options, tensors = dense(q, k, v, *settings)
        else:
            offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            settings = (*how, align, recipe, backward, blocks, softcap)
            options, tensors = packed(q, k, v, *offsets, *settings)
        if sinks is not None:
            sink_logits.check(sinks, tensors[0].shape[1], q.device)
        if q.device.type == "meta":
            return Support(True)  # shapes are all that is computed there
        for is_backward in (False, True):
            answers = ops.explain(*padding.pad(*tensors, options), is_backward=is_backward)
            if not any(state == "chosen" for _, state, _ in answers):
                return Support(False, "; ".join(f"{name}: {why}" for name, _, why in answers))
    except (TypeError, ValueError, NotImplementedError) as error:
        return Support(False, str(error))
    return Support(True)


def _results(out, lse, max_logit, return_lse, return_max_logit):
    if return_lse and return_max_logit:
        return out, lse, max_logit
    if return_lse:
        return out, lse
    if return_max_logit:
        return out, max_logit
    return out


_warned = False


def _doubt_layout(shape):
    """Warns once if [b, h, s, d] was probably given as [b, s, h, d]."""
    global _warned
    if torch.compiler.is_compiling() or _warned:
        return
    if looks_transposed(shape[1], shape[2]):
        _warned = True
        warnings.warn(
            f"sagebwd: q of shape {tuple(shape)} means {shape[1]} tokens and {shape[2]} heads in "
            "the layout [b, s, h, d]; if it is [b, h, s, d], pass layout='bhsd'",
            stacklevel=3,
        )


def _refuse_unknown(function, unknown):
    from .suggest import unexpected_argument

    raise TypeError(unexpected_argument(function, next(iter(unknown)), globals()[function]))
