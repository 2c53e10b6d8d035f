# SPDX-License-Identifier: Apache-2.0
"""Runs a script that uses Megatron-core on a machine without a GPU: what Megatron takes from CUDA
whatever the device comes from the CPU.    megatron_on_cpu.py SCRIPT"""

import contextlib
import runpy
import sys

import megatron.core.tensor_parallel as tensor_parallel
import torch
from torch.overrides import TorchFunctionMode


class NoTracker:
    def fork(self, *_):
        return contextlib.nullcontext()


class OnCpu(TorchFunctionMode):
    """Megatron makes its masks on the GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.cuda = lambda t, *args, **kwargs: t
tensor_parallel.get_cuda_rng_tracker = lambda *args, **kwargs: NoTracker()
with OnCpu():
    runpy.run_path(sys.argv[1], run_name="__main__")
