# SPDX-License-Identifier: Apache-2.0
"""Attention over block lists with PyTorch's products in the dtype of q: what INT8 is compared with.
Slower than kernels made for lists, and without any code of this library."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def sixteen_bit_attention(q, k, v, lists):
    """The listed keys of each block of queries are gathered, and every block of queries becomes a
    sequence of its own. q, k, v are [b, s, h, d] with as many key heads as heads; all rows have to
    list as many blocks, and all blocks have to be full."""
    for x, block in ((q, lists.block_q), (k, lists.block_k)):
        if x.shape[1] % block:
            raise ValueError(f"expected a multiple of {block} tokens, got {x.shape[1]}")
    blocks = k.shape[1] // lists.block_k
    heads = torch.arange(q.shape[0] * q.shape[2], device=q.device)[:, None]
    index = (lists.index.flatten(0, 1).flatten(1) + heads * blocks).flatten()
    rows = lists.index.shape[2]

    def gathered(x):
        # In float32, so that the gradients of a key are summed in it.
        x = x.float().transpose(1, 2).unflatten(2, (-1, lists.block_k)).flatten(0, 2)
        return x.index_select(0, index).to(q.dtype).reshape(heads.numel() * rows, 1, -1, q.shape[3])

    queries = q.transpose(1, 2).unflatten(2, (-1, lists.block_q)).flatten(0, 2)[:, None]
    out = scaled_dot_product_attention(queries, gathered(k), gathered(v))
    return out.reshape(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
