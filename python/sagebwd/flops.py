# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

They are counted as PyTorch counts those of its own attention: a mask does not reduce the count, but
a document counts only its own pairs, and block lists count listed blocks only. PyTorch's module
takes longer to import than this package, so we do not import it; the formulas are registered when
the program does.
"""

import sys
from importlib.machinery import PathFinder

import torch

from . import ops, sla2_ops

_COUNTER = "torch.utils.flop_counter"


def register():
    """Registers the formulas, now or when the counter is imported."""
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register():
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.sagebwd.fwd, get_raw=True)(_forward)
    register_flop_formula(torch.ops.sagebwd.bwd, get_raw=True)(_backward)
    for name in ("linear", "linear_matmuls"):
        fwd, bwd = (getattr(torch.ops.sagebwd, f"{name}_{which}") for which in ("fwd", "bwd"))
        register_flop_formula(fwd, get_raw=True)(_linear_forward)
        register_flop_formula(bwd, get_raw=True)(_linear_backward)
    register_flop_formula(torch.ops.sagebwd.sla2_fwd, get_raw=True)(_sla2_forward)
    register_flop_formula(torch.ops.sagebwd.sla2_bwd, get_raw=True)(_sla2_backward)


class _Finder:
    """Finds the counter as Python would, and registers when its code has run."""

    def find_spec(self, name, path, target=None):
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module):
                run(module)
                _register()

            spec.loader.exec_module = run_and_register
        return spec


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, *rest, **kwargs):
    channels = q.shape[-1] + v.shape[-1]  # S, O
    return 2 * channels * _pairs(q, k, cu_q, cu_k, max_q, max_k, *rest)


def _backward(dout, q, k, v, out, lse, dlse, cu_q, cu_k, max_q, max_k, *rest, **kwargs):
    channels = 3 * q.shape[-1] + 2 * v.shape[-1]  # S', dQ, dK; dV, dP
    return 2 * channels * _pairs(q, k, cu_q, cu_k, max_q, max_k, *rest)


def _linear_forward(q, k, *rest, **kwargs):
    """The sums of the key blocks and the product with the queries. How the blocks are added up is
    the implementation's business."""
    tokens = q.shape[0] * (q.shape[1] * q.shape[2] + k.shape[1] * k.shape[2])
    return 2 * tokens * q.shape[-1] ** 2


def _linear_backward(dout, dnorm, q, k, *rest, **kwargs):
    return 3 * _linear_forward(q, k)  # both again, and two gradients of each


def _sla2_forward(q, k, v, alpha, *rest, **kwargs):
    options = sla2_ops.Options(*rest[: len(sla2_ops.Options._fields)])
    return 2 * 2 * q.shape[-1] * _listed(q, options.sparse()) + _linear_forward(q, k)


def _sla2_backward(dout, q, k, v, alpha, sparse, lse, norm, codes, averages, *rest, **kwargs):
    options = sla2_ops.Options(*rest[: len(sla2_ops.Options._fields)])
    return 5 * 2 * q.shape[-1] * _listed(q, options.sparse()) + _linear_backward(dout, None, q, k)


def _pairs(q, k, cu_q, cu_k, max_q, max_k, *rest):
    """(query, key) pairs of all heads."""
    options = ops.Options(cu_q, cu_k, max_q, max_k, *rest[: len(ops.Options._fields) - 4])
    if options.list_index is not None:
        return _listed(q, options)
    if cu_q is None:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    lengths = zip(_lengths(cu_q, max_q, q.shape[0]), _lengths(cu_k, max_k, k.shape[0]))
    return q.shape[1] * sum(a * b for a, b in lengths)


def _listed(q, options):
    """Pairs of whole listed blocks. Where counts cannot be read, every list is full."""
    index, count = options.list_index, options.list_count
    entries = index.numel() if count is None or not _readable(count) else int(count.sum())
    batch = q.shape[0] if options.cu_seqlens_q is None else 1
    shared = (batch // index.shape[0]) * (q.shape[1] // index.shape[1])
    return entries * shared * options.block_q * options.block_k


def _readable(t):
    from torch._subclasses.fake_tensor import is_fake

    return t.device.type != "meta" and not is_fake(t)


def _lengths(cu, longest, tokens):
    """Lengths of the documents; where they cannot be read, the longest length for each."""
    if not _readable(cu):
        return [longest if longest >= 0 else tokens] * (cu.shape[0] - 1)
    return cu.diff().tolist()
