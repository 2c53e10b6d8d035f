# SPDX-License-Identifier: Apache-2.0
"""INT8 attention on distributed tensors (``torch.distributed.tensor``): batches and heads may be
sharded.

    from sagebwd.integrations import dtensor as sage
    sage.register()
    out = sagebwd.attention(q, k, v, causal=True)     # q, k, v are DTensors

Batch entries and heads are independent, so shards compute what one process would: out, dk and dv
bit for bit, and dq except for the order of its float32 sums, which depends on the number of heads.
(With ``rounding="dither"`` the noise counts heads from the first head of a shard.) The backward
keeps q, k and v, not their codes; call attention on local tensors (``to_local``) to save memory.

Grouped queries stay with their keys: heads are sharded if every shard gets whole groups, and
gathered otherwise. A sharded sequence is gathered too; use
:mod:`sagebwd.integrations.context_parallel` to keep it sharded.
"""

import math

import torch

from .. import ops


def register():
    """Tells PyTorch how the operators of this library may be sharded. A second call changes
    nothing."""
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.sagebwd.fwd.default)(_forward)
    register_sharding(torch.ops.sagebwd.bwd.default)(_backward)


def _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest):
    *_, return_max_logit, save_codes = rest
    if save_codes:
        raise _no_codes()
    _refuse_lists(rest)
    choices = []
    for tensor, lse, max_logit in _placements(q, k, v):
        outputs = [tensor, lse, max_logit if return_max_logit else _replicate(), _replicate()]
        offsets = [_whole(cu_seqlens_q), _whole(cu_seqlens_k)]
        choices.append((outputs, [tensor] * 3 + offsets + [None] * len(rest)))
    return choices


def _backward(dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, *rest):
    if rest[-1] is not None:
        raise _no_codes()
    _refuse_lists(rest)
    choices = []
    for tensor, stats, _ in _placements(q, k, v):
        inputs = [tensor] * 5 + [stats, None if dlse is None else stats]
        offsets = [_whole(cu_seqlens_q), _whole(cu_seqlens_k)]
        choices.append(([tensor] * 3, inputs + offsets + [None] * len(rest)))
    return choices


def _refuse_lists(rest):
    """`rest` follows the two tensors of document offsets."""
    if rest[ops.Options._fields.index("list_index") - 2] is not None:
        raise NotImplementedError(
            "sagebwd: block lists of distributed tensors are not supported: call attention on "
            "local tensors (to_local)"
        )


def _no_codes():
    """Codes of one rank are no part of those of all ranks. PyTorch would cut or gather them as if
    they were, and the gradients would be wrong without an error."""
    return NotImplementedError(
        "sagebwd: codes of distributed tensors are not supported: keep q, k and v for the backward "
        "(save_codes=False)"
    )


def _replicate():
    from torch.distributed.tensor import Replicate

    return Replicate()


def _whole(offsets):
    return None if offsets is None else _replicate()


def _placements(q, k, v):
    """How q (and all tensors of its layout), lse and max_logit may be placed on one dimension of a
    mesh."""
    from torch.distributed.tensor import Shard

    packed = len(q.shape) == 3
    yield _replicate(), _replicate(), _replicate()
    if not packed:
        yield Shard(0), Shard(0), Shard(0)
    if _whole_groups(q, k, v):
        # [b, h, n, d], [b, h, n], [b, h]; packed [t, h, d], [h, t], [documents, h]
        yield Shard(1), Shard(0 if packed else 1), Shard(1)


def _whole_groups(q, k, v):
    """Whether the key heads divide evenly over the ranks that the heads are sharded over."""
    sharded = [
        any(placement.is_shard(1) for placement in placements)
        for placements in zip(q.placements, k.placements, v.placements)
    ]
    ranks = math.prod(n for n, here in zip(q.mesh.shape, sharded) if here)
    return k.shape[1] % ranks == 0
