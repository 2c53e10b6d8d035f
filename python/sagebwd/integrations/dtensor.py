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

from .._ops import attention as ops
from .._ops import attention_shapes as shapes


def register():
    """Tells PyTorch how the operators of this library may be sharded. A second call changes
    nothing."""
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(ops.FORWARD)(shapes.shard_forward)
    register_sharding(ops.BACKWARD)(shapes.shard_backward)
