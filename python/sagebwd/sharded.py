# SPDX-License-Identifier: Apache-2.0
"""Sequences that PyTorch has spread over ranks without telling this library.

Inside of ``torch.distributed.tensor.experimental.context_parallel`` each rank holds part of every
sequence. PyTorch replaces ``F.scaled_dot_product_attention`` there by one that sees all of it. A
call of another attention would see this rank's part alone, and give a wrong answer without an
error.
"""

import sys

import torch
import torch.nn.functional as F

from ._ops.call import is_distributed

REASON = (
    "this rank's tensors are part of a sequence here (PyTorch's context_parallel), and attention "
    "would see that part alone; call F.scaled_dot_product_attention (transformers: "
    "attn_implementation='sdpa') inside of sagebwd.integrations.context_parallel.enabled(), or "
    "sagebwd.integrations.context_parallel.ring_attention"
)

_original = torch._C._nn.scaled_dot_product_attention


def refuse(q):
    """Raises inside of PyTorch's context_parallel, unless q knows how it is spread (DTensor)."""
    # One comparison for most calls. Compiled code is compiled again when F changes.
    if F.scaled_dot_product_attention is not _original and is_sharded():
        if not is_distributed(q):
            raise NotImplementedError(f"sagebwd: {REASON}")


def is_sharded():
    """Whether PyTorch's context_parallel is active."""
    ring = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    return F.scaled_dot_product_attention in getattr(ring, "_replaced_functions", ())
