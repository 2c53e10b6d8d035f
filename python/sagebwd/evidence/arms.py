# SPDX-License-Identifier: Apache-2.0
"""The kinds of attention that are compared, as functions of captured tensors and as implementations
that a transformers model can be switched to.

``exact`` is PyTorch's attention in float32, ``16-bit`` the same in bfloat16. A recipe gets bfloat16
q, k and v too. Whatever a model computes around its attention stays as it is.
"""

import contextlib

import torch
import torch.nn.functional as F

from ..attention import attention
from ..tools.diagnosis import _mask

EXACT, SIXTEEN = "exact", "16-bit"
_PREFIX = "sagebwd-evidence-"  # of the names in transformers' registry


def on_tensors(recipes):
    """{arm: function of a captured layer and of q, k, v [b, h, n, d]}, without the exact one."""
    return {SIXTEEN: _sdpa, **{name: _int8(recipe) for name, recipe in recipes.items()}}


def _sdpa(layer, q, k, v):
    square = q.shape[2] == k.shape[2]
    is_causal = layer.causal and layer.window == (-1, -1) and (layer.top_left or square)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if is_causal else _mask(layer),
        is_causal=is_causal,
        scale=layer.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _int8(recipe):
    return lambda layer, q, k, v: attention(
        q,
        k,
        v,
        layout="bhsd",
        causal=layer.causal,
        softmax_scale=layer.scale,
        window_size=layer.window,
        align="top_left" if layer.top_left else "bottom_right",
        recipe=recipe,
    )


@contextlib.contextmanager
def registered(recipes):
    """{arm: name of an ``attn_implementation``}, the exact one first. The names are valid
    within."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from ..integrations import transformers as hook

    functions, masks = AttentionInterface(), AttentionMaskInterface()
    names = {}
    try:
        for arm in (EXACT, SIXTEEN, *recipes):
            names[arm] = name = _PREFIX + arm
            if arm in recipes:
                hook.register(name, recipe=recipes[arm], packed=False)
                attend = functions[name]
            else:
                attend = functions["sdpa"]
                AttentionMaskInterface.register(name, masks["sdpa"])
            dtype = torch.float32 if arm == EXACT else torch.bfloat16
            AttentionInterface.register(name, _in_dtype(dtype, attend))
        yield names
    finally:
        for name in names.values():
            hook.unregister(name)


def _in_dtype(dtype, attend):
    def forward(module, query, key, value, attention_mask, **kwargs):
        with torch.autocast(query.device.type, enabled=False):
            tensors = (t.to(dtype) for t in (query, key, value))
            out, weights = attend(module, *tensors, attention_mask, **kwargs)
        return out.to(query.dtype), weights

    return forward
