# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's helpers for batches with padding: only the tokens that count, and back."""

import torch
import torch.nn.functional as F

try:  # trainers import these from here
    from einops import rearrange, repeat  # noqa: F401
except ImportError:
    pass


def index_first_axis(input, indices):
    """Rows of a tensor."""
    return input.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """The reverse: a tensor of zeros with these rows."""
    out = values.new_zeros(first_axis_dim, *values.shape[1:])
    return out.index_put((indices,), values)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """hidden_states [b, s, ...] and a mask [b, s] → tokens [t, ...], their places in the flattened
    batch, offsets (int32), the longest length, and how many tokens of each row count."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, offsets, lengths.max().item(), used


def pad_input(hidden_states, indices, batch, seqlen):
    """Tokens [t, ...] back in their places: [b, s, ...], zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))
