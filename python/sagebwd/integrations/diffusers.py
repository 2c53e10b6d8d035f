# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for the transformer models of Hugging Face diffusers.

    from sagebwd.integrations import diffusers as sage
    with sage.enabled():
        loss = train_step(transformer)
        loss.backward()

diffusers keeps its attention backends in a table with a closed list of names. :func:`enable` puts
this library in the place of one of them, ``"native"`` unless told otherwise, so that models need no
change; :func:`disable` puts the original back. Boolean key-padding masks are supported ([b, keys]
or [b, 1, 1, keys], as text padding gives); other masks and dropout raise NotImplementedError, or
run the original with ``fallback=True`` and one warning per reason. Older models that call
``F.scaled_dot_product_attention`` themselves are reached by :mod:`sagebwd.integrations.torch_sdpa`
instead.
"""

import contextlib
import warnings

import torch

from ..attention import attention, attention_varlen
from ..recipe import as_recipe

_replaced = {}  # backend -> (function, constraints, argument names)


def _registry():
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    return AttentionBackendName, _AttentionBackendRegistry


def enable(name="native", *, recipe="vectorwise", backward="int8", fallback=False):
    """Runs the diffusers backend ``name`` here until :func:`disable`. A second call replaces the
    settings."""
    names, registry = _registry()
    backend = names(name)
    disable(name)
    original = registry._backends[backend]
    settings = dict(recipe=as_recipe(recipe), backward=backward)
    warned = set()

    def sagebwd_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
        return_lse=False, _parallel_config=None,
    ):  # fmt: skip
        reason = _refusal(query, key, attn_mask, dropout_p, is_causal, enable_gqa, _parallel_config)
        if reason is not None:
            if not fallback:
                raise NotImplementedError(
                    f"sagebwd: {reason} (enable(fallback=True) would use diffusers' backend)"
                )
            if reason not in warned:
                warned.add(reason)
                warnings.warn(f"sagebwd: diffusers' attention runs instead: {reason}", stacklevel=2)
            given = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                         enable_gqa=enable_gqa, return_lse=return_lse,
                         _parallel_config=_parallel_config)  # fmt: skip
            known = _replaced[backend][2]
            return original(query, key, value, **{k: v for k, v in given.items() if k in known})
        options = dict(
            settings, causal=is_causal, softmax_scale=scale, align="top_left", return_lse=True
        )
        if attn_mask is None:
            out, lse = attention(query, key, value, **options)
        else:
            out, lse = _masked(query, key, value, _key_mask(attn_mask, key), options)
        # diffusers keeps lse as [b, s, h].
        return (out, lse.transpose(1, 2)) if return_lse else out

    _replaced[backend] = (
        original,
        registry._constraints[backend],
        registry._supported_arg_names[backend],
    )
    registry._backends[backend] = sagebwd_attention
    registry._constraints[backend] = []
    # diffusers drops arguments a backend does not name; this one names all, and refuses what it
    # cannot do.
    registry._supported_arg_names[backend] = {
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
        "return_lse",
        "_parallel_config",
    }  # fmt: skip


def disable(name="native"):
    """Puts diffusers' own backend back. Does nothing when it is in place."""
    names, registry = _registry()
    backend = names(name)
    if backend in _replaced:
        function, constraints, arguments = _replaced.pop(backend)
        registry._backends[backend] = function
        registry._constraints[backend] = constraints
        registry._supported_arg_names[backend] = arguments


@contextlib.contextmanager
def enabled(name="native", **options):
    """:func:`enable` for the time of a ``with`` block."""
    enable(name, **options)
    try:
        yield
    finally:
        disable(name)


def _refusal(query, key, attn_mask, dropout_p, is_causal, enable_gqa, parallel_config):
    if dropout_p:
        return f"dropout_p={dropout_p} is not supported"
    if parallel_config is not None:
        return "diffusers' context parallelism is not supported"
    if not enable_gqa and query.shape[2] != key.shape[2]:
        return "query and key heads differ without enable_gqa"
    if attn_mask is not None and (is_causal or _key_mask(attn_mask, key) is None):
        shape = tuple(attn_mask.shape)
        return f"attn_mask of shape {shape} and dtype {attn_mask.dtype} is not supported"
    return None


def _key_mask(mask, key):
    """[b, keys] booleans, or None for a mask that is more than key padding."""
    if mask.dtype != torch.bool or mask.shape[-1] != key.shape[1]:
        return None
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    if mask.dim() != 2 or mask.shape[0] not in (1, key.shape[0]):
        return None
    return mask.expand(key.shape[0], -1)


def _masked(query, key, value, mask, options):
    """Every batch entry as a document of all its queries and its real keys."""
    b, s, h, d = query.shape
    where = torch.nonzero(mask.reshape(-1)).flatten()
    keys, values = (t.reshape(-1, t.shape[2], d).index_select(0, where) for t in (key, value))
    zero = mask.new_zeros(1, dtype=torch.int32)
    cu_k = torch.cat([zero, mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)])
    cu_q = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=query.device)
    out, lse = attention_varlen(query.reshape(b * s, h, d), keys, values, cu_q, cu_k, **options)
    return out.view(b, s, h, d), lse.view(h, b, s).transpose(0, 1)
