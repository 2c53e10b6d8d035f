# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for torchtitan: a module for the place of ``inner_attention``.

torchtitan's trainer takes it as an override, without a change of code:

    --override.imports sagebwd.integrations.torchtitan_override.varlen

In a script of your own, after the model is built and before it is parallelized:

    from sagebwd.integrations import torchtitan as sage
    undo = sage.convert(model)        # every attention layer; undo() puts the old modules back

What is supported and what is refused: docs/distributed.md. For selective activation checkpointing
add ``torch.ops.sagebwd.fwd.default`` to the list of operators whose results are saved.
"""

import torch

from ..attention import attention, attention_varlen
from ..recipe import as_recipe
from .head_dims import padded


class InnerAttention(torch.nn.Module):
    """Attention with torchtitan's calling convention, for models of your own. It needs no
    torchtitan: packed with document offsets, plain batches without them."""

    def __init__(self, *, window_size=(-1, 0), recipe="vectorwise", backward="int8"):
        super().__init__()
        self.window_size = tuple(window_size)
        self.recipe, self.backward = as_recipe(recipe), backward

    def forward(
        self,
        q,
        k,
        v,
        *,
        attention_masks=None,
        attention_metadata=None,
        scale=None,
        enable_gqa=False,
        is_causal=None,
        out_transform=None,
    ):
        """Attention of q over k and v, all [b, s, h, d], or packed in one row."""
        window = self.window_size
        if is_causal is not None:
            window = (window[0], 0 if is_causal else -1)
        documents = attention_masks if attention_metadata is None else attention_metadata
        out, lse = attend(q, k, v, documents, window, scale, enable_gqa, self.recipe, self.backward)
        return out if out_transform is None else out_transform(out, lse)


def attend(q, k, v, documents, window, scale, enable_gqa, recipe, backward):
    """(out, lse) as [b, l, heads, dv] and [b, l, heads]."""
    if not enable_gqa and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"{q.shape[-2]} query heads and {k.shape[-2]} key heads need enable_gqa=True"
        )
    shape, width = q.shape[:-1], v.shape[-1]
    q, k, v, scale = padded(q, k, v, scale)
    options = dict(
        window_size=window, softmax_scale=scale, recipe=recipe, backward=backward, return_lse=True
    )
    if documents is None:
        if q.dim() != 4:
            raise ValueError(
                f"q: expected [b, l, heads, d] without document offsets, got {tuple(q.shape)}"
            )
        if window[1] >= 0 and q.shape[1] != k.shape[1]:
            raise NotImplementedError(
                f"sagebwd: a causal mask of {q.shape[1]} queries and {k.shape[1]} keys is not "
                "supported in torchtitan: with context parallelism use ScaledDotProductAttention "
                "and the partial_dtensor backend"
            )
        out, lse = attention(q, k, v, **options)
        return out[..., :width], lse.transpose(1, 2)
    if not hasattr(documents, "cu_seq_q"):
        raise NotImplementedError(
            f"sagebwd: masks of type {type(documents).__name__} are not supported: use "
            "torchtitan's variable-length attention, whose masks are document offsets"
        )
    flat = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
    offsets = (documents.cu_seq_q, documents.cu_seq_k, documents.max_q, documents.max_k)
    out, lse = attention_varlen(*flat, *offsets, **options)
    return out[..., :width].reshape(*shape, width), lse.transpose(0, 1).reshape(shape)


def convert(model, *, recipe="vectorwise", backward="int8"):
    """Replaces every ``inner_attention`` of a torchtitan model. Returns a function that puts the
    old ones back. Call it before the model is parallelized: parallelism wraps the forward of
    these modules."""
    found = [
        (module, module.inner_attention)
        for module in model.modules()
        if isinstance(getattr(module, "inner_attention", None), torch.nn.Module)
    ]
    if not found:
        raise ValueError(
            "convert: the model has no inner_attention modules; put InnerAttention into its "
            "attention layers by hand, or use sagebwd.integrations.torch_sdpa"
        )
    try:
        from .torchtitan_override import replacement
    except ImportError as error:
        raise NotImplementedError(
            "sagebwd: convert needs torchtitan 0.3 (torchtitan.models.common.attention); put "
            "InnerAttention into the attention layers by hand"
        ) from error
    new = [replacement(inner, recipe, backward) for _, inner in found]  # raises before any change
    for (module, _), attention_module in zip(found, new):
        module.inner_attention = attention_module

    def undo():
        for module, inner in found:
            module.inner_attention = inner

    return undo
