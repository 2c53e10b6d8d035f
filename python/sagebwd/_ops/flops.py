# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

PyTorch's module takes longer to import than this package, so we do not import it; the formulas are
registered when the program does.
"""

import sys
from importlib.machinery import PathFinder

import torch

from . import attention_shapes, linear, sla2

_COUNTER = "torch.utils.flop_counter"


def register():
    """Registers the formulas, now or when the counter is imported."""
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register():
    from torch.utils.flop_counter import register_flop_formula

    formulas = {
        "fwd": attention_shapes.forward_flops,
        "bwd": attention_shapes.backward_flops,
        "linear_fwd": linear.forward_flops,
        "linear_bwd": linear.backward_flops,
        "linear_matmuls_fwd": linear.forward_flops,
        "linear_matmuls_bwd": linear.backward_flops,
        "sla2_fwd": sla2.forward_flops,
        "sla2_bwd": sla2.backward_flops,
    }
    for name, formula in formulas.items():
        register_flop_formula(getattr(torch.ops.sagebwd, name), get_raw=True)(formula)


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
