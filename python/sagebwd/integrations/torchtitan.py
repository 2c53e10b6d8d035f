# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for torchtitan: a module for the place of ``inner_attention``.

    from sagebwd.integrations import torchtitan as sage
    undo = sage.convert(model)        # every attention layer; undo() puts the old modules back

The module takes torchtitan's packed form (offsets in ``attention_masks``, named
``attention_metadata`` in newer versions; [b, l, heads, d] or [t, heads, d] tensors) and, without
offsets, plain causal batches. For selective activation checkpointing add
``torch.ops.sagebwd.fwd.default`` to the list of operators whose results are saved.
"""

import torch

from ..attention import attention, attention_varlen
from ..recipe import as_recipe


class InnerAttention(torch.nn.Module):
    """Attention with torchtitan's calling convention."""

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
        if not enable_gqa and q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"{q.shape[-2]} query heads and {k.shape[-2]} key heads need enable_gqa=True"
            )
        window = self.window_size
        if is_causal is not None:
            window = (window[0], 0 if is_causal else -1)
        options = dict(
            window_size=window,
            softmax_scale=scale,
            recipe=self.recipe,
            backward=self.backward,
            return_lse=True,
        )
        documents = attention_masks if attention_metadata is None else attention_metadata
        if documents is None:
            if q.dim() != 4:
                raise ValueError(
                    f"q: expected [b, l, heads, d] without document offsets, got {tuple(q.shape)}"
                )
            out, lse = attention(q, k, v, **options)
            lse = lse.transpose(1, 2)
        elif not hasattr(documents, "cu_seq_q"):
            raise NotImplementedError(
                f"sagebwd: masks of type {type(documents).__name__} are not supported: use "
                "torchtitan's variable-length attention, whose masks are document offsets"
            )
        else:
            flat = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
            offsets = (documents.cu_seq_q, documents.cu_seq_k, documents.max_q, documents.max_k)
            out, lse = attention_varlen(*flat, *offsets, **options)
            out, lse = out.view(q.shape), lse.transpose(0, 1).reshape(q.shape[:-1])
        return out if out_transform is None else out_transform(out, lse)


def convert(model, *, recipe="vectorwise", backward="int8"):
    """Replaces every ``inner_attention`` of a model. Returns a function that puts the old ones
    back."""
    replaced = []
    for module in list(model.modules()):
        inner = getattr(module, "inner_attention", None)
        if isinstance(inner, torch.nn.Module):
            window = getattr(inner, "window_size", (-1, 0))
            replaced.append((module, inner))
            module.inner_attention = InnerAttention(
                window_size=window, recipe=recipe, backward=backward
            )
    if not replaced:
        raise ValueError(
            "convert: the model has no inner_attention modules; put InnerAttention into its "
            "attention layers by hand, or use sagebwd.integrations.torch_sdpa"
        )

    def undo():
        for module, inner in replaced:
            module.inner_attention = inner

    return undo
