# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for ComfyUI, with gradients. In the ``__init__.py`` of a custom node:

    from sagebwd.integrations import comfyui
    comfyui.register()                     # then choose "sagebwd" where a node names an attention
    NODE_CLASS_MAPPINGS = {}

:func:`attention` has the arguments of ComfyUI's own attention functions and can take the place of
one.
"""

import functools

import torch.nn.functional as F

from . import sdpa_call

# What ComfyUI tells an attention function, and what does not change its result.
_HARMLESS = frozenset(("attn_precision", "transformer_options", "_inside_attn_wrapper"))


def register(name="sagebwd", *, recipe="vectorwise", backward="int8", fallback=False):
    """Adds the attention to ComfyUI's table under ``name``. Returns the function. ``fallback=True``
    runs PyTorch's attention for calls that are not supported, which raise otherwise."""
    from comfy.ldm.modules import attention as table

    if not hasattr(table, "register_attention_function"):
        raise ImportError(
            "sagebwd: this ComfyUI has no register_attention_function: update it, or put "
            "sagebwd.integrations.comfyui.attention in the place of its optimized_attention"
        )
    if name in table.REGISTERED_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"register: ComfyUI has an attention {name!r} already and would keep it; give another "
            "name"
        )
    function = functools.partial(attention, recipe=recipe, backward=backward, fallback=fallback)
    functools.update_wrapper(function, attention)
    table.register_attention_function(name, function)
    return function


def attention(
    q,
    k,
    v,
    heads,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
    *,
    low_precision_attention=True,
    scale=None,
    enable_gqa=False,
    recipe="vectorwise",
    backward="int8",
    fallback=False,
    **kwargs,
):
    """Attention as ComfyUI calls it: q, k, v are [b, tokens, heads · head dim], or with
    ``skip_reshape`` [b, heads, tokens, head dim]; the result likewise, by ``skip_output_reshape``.
    A model that asks for ``low_precision_attention=False`` gets PyTorch's attention."""
    if unknown := [key for key in kwargs if key not in _HARMLESS and kwargs[key] is not None]:
        raise NotImplementedError(
            f"sagebwd: the attention keyword {unknown[0]!r} of ComfyUI is not supported: choose "
            "another attention for this model"
        )
    if not skip_reshape:
        d = q.shape[-1] // heads
        q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
    if mask is not None and mask.dim() < 4:  # [queries, keys], or one for each entry
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
    settings = sdpa_call.Settings.of(recipe, backward, fallback)
    reason = None
    if low_precision_attention:
        reason = sdpa_call.refusal(q, k, v, mask, 0.0)
        if reason is None:
            try:
                out, _ = sdpa_call.run(settings, q, k, v, mask, False, scale, enable_gqa)
            except NotImplementedError as error:
                reason = str(error).removeprefix("sagebwd: ")
        if reason is not None and not fallback:
            raise NotImplementedError(f"sagebwd: {reason} (register(fallback=True) runs PyTorch's)")
    if reason is not None or not low_precision_attention:
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)
