# SPDX-License-Identifier: Apache-2.0
"""The self-attention of diffusers' Wan models, with sparse-linear attention in it."""

import torch


def is_wan_attention(module):
    """Whether it is the attention class of a Wan model. Several files of diffusers have one."""
    kind = type(module)
    return kind.__name__ == "WanAttention" and kind.__module__.startswith("diffusers.")


class Processor:
    """An attention processor of diffusers that gives q, k and v to ``attn.sla2``."""

    # diffusers sets these on every processor of a model.
    _attention_backend = None  # for cross-attention; here there is nothing to choose
    _parallel_config = None

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None
    ):
        if encoder_hidden_states is not None:
            raise NotImplementedError("sla2: expected self-attention, got encoder_hidden_states")
        if attention_mask is not None:
            raise NotImplementedError(
                "sla2: expected no attention_mask, got one; call the model without it, or leave "
                "this layer as it was"
            )
        if self._parallel_config is not None:
            raise NotImplementedError(
                "sla2: diffusers' context parallelism splits the sequence, of which the router "
                "needs the whole; split the batch instead"
            )
        if getattr(attn, "fused_projections", False):
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = (layer(hidden_states) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        if rotary_emb is not None:
            q, k = _rotated(q, *rotary_emb), _rotated(k, *rotary_emb)
        out = attn.sla2(q, k, v).flatten(2).type_as(q)
        for layer in attn.to_out:
            out = layer(out)
        return out


def _rotated(x, cos, sin):
    """Pairs of neighbouring channels turned by their angles, which the tables hold twice."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)
