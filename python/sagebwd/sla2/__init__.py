# SPDX-License-Identifier: Apache-2.0
"""SLA2: sparse-linear attention with a learned router (arXiv 2602.12675).

    from sagebwd import sla2
    layer = sla2.Attention(heads, head_dim, keep=.05)        # q, k, v → out; causal=True
    names = sla2.convert(model, keep=.05)                    # a Wan-like or Llama-like model
    print(sla2.fit(model, batches, steps=200))               # stage 1: routers and α

docs/sla2.md has the method and what to expect.
"""

from .attention import Attention
from .checkpoint import load, revert, save
from .convert import convert
from .fit import fit
from .soft_top_k import soft_top_k

__all__ = ["Attention", "convert", "fit", "load", "revert", "save", "soft_top_k"]
