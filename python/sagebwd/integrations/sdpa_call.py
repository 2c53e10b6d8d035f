# SPDX-License-Identifier: Apache-2.0
"""One call of scaled dot-product attention in PyTorch's terms: whether it can run here, the form
that the kernels take, and its result. The hooks for PyTorch and for diffusers share this file.

If a call cannot run here, the reason is a string that says what came and what to do about it.
"""

from typing import NamedTuple

import torch

from .. import masks, sharded
from .._ops import attention as ops
from ..call import BACKWARD_MATMULS, check_tensors, readable
from ..recipe import as_recipe


class Settings(NamedTuple):
    """How the calls of a hook run."""

    recipe: str = "vectorwise"
    seed: int = 0
    fallback: bool = False
    save_codes: bool = True

    @classmethod
    def of(cls, recipe, backward, fallback):
        if backward not in ("int8", "bf16"):
            raise ValueError(f"backward: expected 'int8' or 'bf16', got {backward!r}")
        recipe = as_recipe(recipe)
        lifted = BACKWARD_MATMULS if backward == "bf16" else ()
        return cls(recipe.text(lifted), recipe.seed, fallback, recipe.save_codes)

    def options(self, scale, causal, top_left):
        return ops.Options(
            softmax_scale=scale,
            causal=causal,
            top_left=top_left,
            recipe=self.recipe,
            seed=self.seed,
        )


# --- what can run here ----------------------------------------------------------------------------


def refusal(q, k, v, mask, dropout_p):
    """The reason why a call cannot run here, as far as it is known without reading values; else
    None."""
    if dropout_p:
        return dropout_reason(dropout_p)
    if any(t.is_nested for t in (q, k, v)):
        return (
            "nested tensors are not supported: call sagebwd.attention_varlen with values and "
            "offsets, or pad"
        )
    if mask is not None:
        try:
            masks.check(mask)
        except (TypeError, NotImplementedError) as error:
            return str(error)
    return tensor_reason(q, k, v)


def dropout_reason(dropout_p):
    return (
        f"dropout_p={dropout_p} is not supported: set the dropout of attention to 0 "
        "(nn.MultiheadAttention, nn.TransformerEncoderLayer: layer.self_attn.dropout = 0.0; other "
        "dropouts may stay)"
    )


def tensor_reason(q, k, v):
    """The reason why tensors of this kind cannot be attended to, whatever the rest of the call."""
    for t in (q, k, v):
        if t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{t.dtype} is not supported: cast to bfloat16, float16 or float32, or autocast"
    width = max(t.shape[-1] for t in (q, k, v))
    if width > 256:
        return f"head dim {width} is not supported: use more heads of at most 256 channels"
    return None


def kernel_reason(q, k, v):
    """:func:`tensor_reason` for an operator, whose results have the shapes that PyTorch knows."""
    reason = tensor_reason(q, k, v)
    if reason is not None:
        return reason
    try:
        check_tensors(q, k, v, q.dim(), any_head_dim=True)
    except (ValueError, NotImplementedError) as error:
        return str(error).removeprefix("sagebwd: ")
    if v.shape[-1] != q.shape[-1]:
        return (
            f"head dim of v: expected that of q ({q.shape[-1]}), got {v.shape[-1]}; code that is "
            "compiled inside the block pads"
        )
    return None


# --- the form the kernels take --------------------------------------------------------------------


def as_heads(q, k, v, mask, enable_gqa):
    """q, k, v as [b, h, s, d], a mask that fits them, and the leading dimensions of the result:
    those of q, k and v, broadcast as PyTorch's matmul would."""
    if q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]:
        if k.shape[1] == v.shape[1] and (enable_gqa or k.shape[1] in (1, q.shape[1])):
            return q, k, v, mask, q.shape[:2]
    if enable_gqa:
        # Each has its own number of heads.
        lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v)))
        if k.shape[-3] != v.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        if mask is not None and mask.dim() > 2:
            whole = (*lead, q.shape[-3], *mask.shape[-2:])
            mask = masks.expanded(mask, whole).reshape(lead.numel(), *whole[-3:])
        heads = [t.expand(*lead, *t.shape[-3:]) for t in (q, k, v)]
        q, k, v = (t.reshape(lead.numel(), *t.shape[-3:]) for t in heads)
        return q, k, v, mask, (*lead, q.shape[1])
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
    if len(lead) != 2 and mask is not None and mask.dim() > 2:
        tokens = mask.shape[-2:]
        mask = masks.expanded(mask, (*lead, *tokens)).reshape(lead.numel(), 1, *tokens)
    heads = lead if len(lead) == 2 else (lead.numel(), 1)
    q, k, v = (t.expand(*lead, *t.shape[-2:]).reshape(*heads, *t.shape[-2:]) for t in (q, k, v))
    return q, k, v, mask, lead


# --- running --------------------------------------------------------------------------------------


def run(settings, q, k, v, mask=None, is_causal=False, scale=None, enable_gqa=False):
    """(out, lse) of a call that :func:`refusal` let pass, differentiable. [b, h, s, d], a causal
    mask at the top left. Raises NotImplementedError with the reason if it cannot run after all."""
    if scale == 0:
        raise NotImplementedError(
            "scale=0.0 is not supported: such attention is the mean of the visible values"
        )
    sharded.refuse(q)
    q, k, v, mask, lead = as_heads(q, k, v, mask, enable_gqa)
    q, k, v = readable(q, k, v)
    options = settings.options(scale, is_causal, top_left=True)
    documents = masks.read(mask, q, k, is_causal)
    out, lse = masks.forward(q, k, v, options, documents, save_codes=settings.save_codes)
    return out.reshape(*lead, *out.shape[2:]), lse.reshape(*lead, q.shape[2])


def rows(t):
    return t if t.stride(-1) == 1 else t.contiguous()
