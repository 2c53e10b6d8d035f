# SPDX-License-Identifier: Apache-2.0
"""Causal sparse-linear attention in language models of transformers, through the attention
interface that sagebwd registers there (sagebwd/integrations/transformers.py)."""

import inspect

_PARTS = ("config", "layer_idx", "head_dim", "q_proj", "k_proj", "v_proj", "o_proj")


def is_language_attention(module):
    """Whether it is causal self-attention of transformers with projections as Llama has them."""
    if not type(module).__module__.startswith("transformers."):
        return False
    if getattr(module, "is_causal", None) is not True:
        return False
    if not all(hasattr(module, part) for part in _PARTS):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


def sizes(name, module):
    """The heads of a layer, as sla2.Attention takes them. NotImplementedError if it is of another
    kind than its projections say."""
    heads = module.config.num_attention_heads
    kv_heads = getattr(module.config, "num_key_value_heads", None) or heads
    wanted = (heads, kv_heads, kv_heads)
    found = [getattr(module, p).out_features // module.head_dim for p in _PARTS[3:6]]
    kind = type(module).__name__
    if list(wanted) != found:
        raise NotImplementedError(
            f"model: {name} ({kind}) projects to {found} heads for q, k and v, expected "
            f"{list(wanted)}; leave it out of `where`"
        )
    if getattr(module, "sliding_window", None) is not None:
        raise NotImplementedError(
            f"model: {name} ({kind}) sees {module.sliding_window} tokens only; leave it out of "
            "`where`"
        )
    scale = getattr(module, "scaling", module.head_dim**-0.5) * module.head_dim**0.5
    if abs(scale - 1) > 1e-6:
        raise NotImplementedError(
            f"model: {name} ({kind}) scales logits by {scale:g}/sqrt(d), expected 1/sqrt(d); leave "
            "it out of `where`"
        )
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": module.head_dim}


def attach(model, layers):
    """Makes the model call sagebwd, and its layers refuse to run with another attention, which
    would not know of their `sla2`."""
    from ..integrations import transformers as sage

    if not all(sage.is_registered(m.config._attn_implementation) for m in layers.values()):
        if not hasattr(model, "set_attn_implementation"):
            raise ValueError(
                f"model: {type(model).__name__} has no set_attn_implementation; convert the model "
                "of transformers that is in it"
            )
        if not sage.is_registered("sagebwd"):
            sage.register()
        model.sla2_before = model.config._attn_implementation
        model.set_attn_implementation("sagebwd")
    for layer in layers.values():
        layer.register_forward_pre_hook(guard)


def guard(module, args):
    from ..integrations import transformers as sage

    name = module.config._attn_implementation
    if not sage.is_registered(name):
        raise RuntimeError(
            f"sla2: the model runs with attn_implementation={name!r}, which does not know of the "
            "sla2 module of its layers; call model.set_attn_implementation('sagebwd')"
        )
