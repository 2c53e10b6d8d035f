# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for Megatron-core: a ``core_attention`` for layer specs. Importing this module
needs Megatron-core.

    from sagebwd.integrations.megatron import SageDotProductAttention
    spec.submodules.self_attention.submodules.core_attention = SageDotProductAttention

Tensors stay in Megatron's [s, b, heads, d] order: they are read through their strides. Causal and
full attention, packed sequences (``qkv_format="thd"``), grouped queries, windows and tensor
parallelism are supported; attention dropout, biases, padding masks and Megatron's own context
parallelism raise NotImplementedError.
"""

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import divide

from ..attention import attention, attention_varlen

_CAUSAL = {"causal", "padding_causal", "causal_bottom_right"}
_FULL = {"no_mask", "padding"}


class SageDotProductAttention(MegatronModule):
    """Megatron's DotProductAttention with INT8 matmuls. ``recipe`` and ``backward`` may be set as
    class attributes of a subclass."""

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
        pg_collection=None,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        softmax = getattr(config, "softmax_type", "vanilla")
        for given, what, remedy in (
            (dropout, f"attention dropout {dropout}", "set attention_dropout=0.0 in the config"),
            (
                config.context_parallel_size > 1,
                "context parallelism",
                "set context_parallel_size=1, or use sagebwd.integrations.context_parallel",
            ),
            (softmax != "vanilla", f"softmax_type {softmax!r}", "set softmax_type='vanilla'"),
        ):
            if given:
                raise NotImplementedError(
                    f"sagebwd: {what} is not supported in Megatron layers: {remedy}"
                )
        self.attn_mask_type = attn_mask_type
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.heads = divide(config.num_attention_heads, pg_collection.tp.size())
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        if config.apply_query_key_layer_scaling:
            self.softmax_scale /= max(1, layer_number)
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window_size = tuple(config.window_size) if windowed else (-1, -1)

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
        """query [s, b, heads, d], or packed [t, heads, d]; result [s, b, heads·d] or [t,
        heads·d]."""
        if attention_bias is not None:
            raise NotImplementedError(
                "sagebwd: an attention bias is not supported: use rotary embeddings, or Megatron's "
                "DotProductAttention for these layers"
            )
        kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        if kind not in _CAUSAL | _FULL:
            raise NotImplementedError(
                f"sagebwd: attention masks of the kind {kind!r} are not supported: use one of "
                f"{', '.join(sorted(_CAUSAL | _FULL))}, or pack the sequences"
            )
        options = dict(
            causal=kind in _CAUSAL,
            window_size=self.window_size,
            softmax_scale=self.softmax_scale,
            recipe=self.recipe,
            backward=self.backward,
        )
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, options)
        if kind.startswith("padding") and attention_mask is not None:
            raise NotImplementedError(
                "sagebwd: padding masks are not supported in Megatron layers; pack the sequences"
            )
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = attention(q, k, v, layout="bhsd", **options)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query, key, value, packed, options):
        if packed.qkv_format != "thd":
            raise NotImplementedError(
                f"sagebwd: packed sequences of format {packed.qkv_format!r} are not supported: "
                "use qkv_format='thd'"
            )
        for padded in (packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded):
            if padded is not None:
                raise NotImplementedError(
                    "sagebwd: padding between packed sequences is not supported: leave out "
                    "cu_seqlens_q_padded and cu_seqlens_kv_padded, and the padding"
                )
        offsets = (
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
        )
        return attention_varlen(query, key, value, *offsets, **options).flatten(1)
