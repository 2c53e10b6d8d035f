# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for Megatron-core: a ``core_attention`` for layer specs. Importing this module
needs Megatron-core.

    from sagebwd.integrations.megatron import SageDotProductAttention
    spec.submodules.self_attention.submodules.core_attention = SageDotProductAttention

Tensors stay in Megatron's [s, b, heads, d] order: they are read through their strides. What is
supported and what is refused: docs/distributed.md.
"""

import weakref

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention

from .. import masks
from ..attention import attention, attention_varlen
from .head_dims import padded

_CAUSAL = {"causal", "padding_causal", "causal_bottom_right"}


class SageDotProductAttention(DotProductAttention):
    """Megatron's DotProductAttention with INT8 matmuls. The base class builds and saves the
    learnable softmax offset. ``recipe`` and ``backward`` may be set as class attributes of a
    subclass."""

    recipe = "vectorwise"
    backward = "int8"

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        k_channels=None,
        v_channels=None,
        **groups,
    ):
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(
            config.window_size, getattr(config, "window_attn_skip_freq", None), layer_number
        )
        self_window = tuple(config.window_size) if windowed else (-1, -1)
        ahead = windowed and attn_mask_type.name in _CAUSAL and self_window[1] != 0
        for given, what, remedy in (
            (dropout, f"attention dropout {dropout}", "set attention_dropout=0.0 in the config"),
            (
                config.context_parallel_size > 1,
                "context parallelism",
                "set context_parallel_size=1, or keep Megatron's TEDotProductAttention",
            ),
            (ahead, f"a causal layer with window_size {self_window}", "set its second number to 0"),
            (_set(config, "qk_clip"), "qk_clip", "set qk_clip=False"),
            (
                _set(config, "log_max_attention_logit"),
                "log_max_attention_logit",
                "set log_max_attention_logit=False",
            ),
            (
                _set(config, "fp8_dot_product_attention")
                or _set(config, "fp8_multi_head_attention"),
                "FP8 attention",
                "set fp8_dot_product_attention=False and fp8_multi_head_attention=False: these "
                "layers compute in INT8",
            ),
        ):
            if given:
                raise NotImplementedError(
                    f"sagebwd: {what} is not supported in Megatron layers: {remedy}"
                )
        super().__init__(
            config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale,
            cp_comm_type, **groups,
        )  # fmt: skip
        # apply_query_key_layer_scaling divides the logits of Megatron's matmul by the layer number
        # and multiplies them by it again before the softmax: nothing is left of it here.
        channels = config.kv_channels if k_channels is None else k_channels
        self.scale = channels**-0.5 if softmax_scale is None else softmax_scale
        self.window = self_window

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        """query [s, b, heads, d], or packed [t, heads, d]; result [s, b, heads·dv] or [t,
        heads·dv]."""
        if attention_bias is not None:
            raise NotImplementedError(
                "sagebwd: an attention bias is not supported: use rotary embeddings, or Megatron's "
                "DotProductAttention for these layers"
            )
        kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        width = value.shape[-1]
        query, key, value, scale = padded(query, key, value, self.scale)
        options = dict(
            softmax_scale=scale,
            recipe=self.recipe,
            backward=self.backward,
            deterministic=True if _set(self.config, "deterministic_mode") else None,
            return_lse=True,
        )
        if packed_seq_params is not None:
            if attention_mask is not None or kind == "arbitrary":
                raise NotImplementedError(
                    "sagebwd: packed sequences with an attention mask are not supported: the "
                    "offsets say where documents end, give attention_mask=None"
                )
            offsets = _offsets(packed_seq_params)
            mask = dict(causal=kind in _CAUSAL, window_size=self.window)
            out, lse = attention_varlen(query, key, value, *offsets, **mask, **options)
            return self._with_offset(out, lse.transpose(0, 1))[..., :width].flatten(1)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        documents = self._documents(attention_mask, kind, q, k)
        mask = dict(
            causal=documents.causal,
            window_size=documents.window,
            align="top_left" if documents.top_left else "bottom_right",
        )
        if documents.cu_q is None:
            out, lse = attention(q, k, v, layout="bhsd", **mask, **options)
        else:
            packed = documents.pack_q(q), documents.pack_k(k), documents.pack_k(v)
            offsets = documents.cu_q, documents.cu_k
            out, lse = attention_varlen(*packed, *offsets, **mask, **options)
            out, lse = documents.unpack_q(out), documents.unpack_rows(lse)
        out = self._with_offset(out, lse)[..., :width]
        return out.permute(2, 0, 1, 3).flatten(2)

    def _with_offset(self, out, lse):
        """The output with one more key of logit ``softmax_offset`` and value 0. Heads are the
        second dimension of both."""
        offset = getattr(self, "softmax_offset", None)
        if offset is None:
            return out
        offset = offset.float().to(lse.device)
        offset = offset.view(-1, *[1] * (lse.dim() - 2))
        return (out * torch.sigmoid(lse - offset)[..., None]).to(out.dtype)

    def _documents(self, mask, kind, q, k):
        """What q [b, heads, s, d] may see, as :class:`~sagebwd.masks.Documents`."""
        b, s, sk = q.shape[0], q.shape[2], k.shape[2]
        if kind == "causal" and s not in (1, sk):
            raise NotImplementedError(
                f"sagebwd: a causal mask of {s} queries and {sk} keys is ambiguous: use "
                "AttnMaskType.causal_bottom_right"
            )
        if mask is None and kind == "arbitrary":
            raise ValueError("attention_mask: expected a mask for AttnMaskType.arbitrary, got None")
        windowed = self.window != (-1, -1)
        plain = masks.Documents(b, s, sk, causal=kind in _CAUSAL, window=self.window)
        if mask is None:
            return plain
        found = _read(mask, kind, q, k)
        if not windowed:
            return found
        # Megatron's window replaces the mask. That loses nothing only if the mask is the plain
        # causal one, or shows everything.
        if (
            found.cu_q is None
            and found.window == (-1, -1)
            and found.causal <= (self.window[1] == 0)
        ):
            return plain
        raise NotImplementedError(
            "sagebwd: window_size together with an attention mask of documents or padding is not "
            "supported (Megatron's own attention drops the mask): pack the sequences "
            "(qkv_format='thd')"
        )


def _set(config, name):
    return bool(getattr(config, name, False))


def _offsets(packed):
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)"""
    if packed.qkv_format != "thd":
        raise NotImplementedError(
            f"sagebwd: packed sequences of format {packed.qkv_format!r} are not supported: "
            "use qkv_format='thd'"
        )
    if (getattr(packed, "local_cp_size", None) or 1) > 1:
        raise NotImplementedError(
            "sagebwd: packed sequences with context parallelism are not supported: leave out "
            "local_cp_size, or keep Megatron's TEDotProductAttention"
        )
    pairs = (
        (packed.cu_seqlens_q, packed.cu_seqlens_q_padded),
        (packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded),
    )
    if _set(packed, "pad_between_seqs") or any(p is not None and p is not cu for cu, p in pairs):
        raise NotImplementedError(
            "sagebwd: padding between packed sequences is not supported: leave out "
            "cu_seqlens_q_padded and cu_seqlens_kv_padded, and the padding"
        )
    return packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv


_last = (None, None, None)  # a mask (weakly), what it was read for, its documents


def _read(mask, kind, q, k):
    """The documents of a mask (True: hidden). All layers of a model get the same mask: the last one
    is remembered, because reading it waits for the GPU."""
    global _last
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise NotImplementedError(
            f"sagebwd: attention_mask: expected one bool tensor, True where a key is hidden, got "
            f"{got}"
        )
    b, s, sk = q.shape[0], q.shape[2], k.shape[2]
    version = None if mask.is_inference() else mask._version
    use = (version, kind in _CAUSAL, kind == "padding_causal", b, s, sk)
    before, used, documents = _last
    if version is not None and before is not None and before() is mask and used == use:
        return documents
    visible = ~mask
    if kind in _CAUSAL and s > 1:
        triangle = torch.ones(s, sk, dtype=torch.bool, device=mask.device).tril(sk - s)
        if kind == "padding_causal":
            visible = visible & triangle
        elif bool((visible & ~triangle).any()):
            raise NotImplementedError(
                f"sagebwd: the attention mask shows keys after their query, but its type is "
                f"{kind!r}: make the mask causal, or use AttnMaskType.padding_causal, "
                "AttnMaskType.padding or AttnMaskType.arbitrary"
            )
    documents = masks.read(visible, q, k)
    if documents is None:
        raise NotImplementedError("sagebwd: attention masks on the meta device are not supported")
    _last = (weakref.ref(mask), use, documents)
    return documents
