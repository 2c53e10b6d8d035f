# SPDX-License-Identifier: Apache-2.0
"""Hooks into other packages, one module each, loaded on first use. Importing a module changes
nothing; its functions act when called and can be undone.

    torch_sdpa        F.scaled_dot_product_attention, on the CPU and on CUDA
    transformers      attn_implementation="sagebwd"
    diffusers         the attention of diffusers' models
    comfyui           a name in ComfyUI's table of attention functions
    torchtitan        an inner-attention module
    megatron          a core-attention module for a layer spec
    context_parallel  ring attention over several ranks
    dtensor           how distributed tensors may be sharded: batches and heads

Two more are for a trainer to import, by a name in its configuration: ``axolotl.SagePlugin``, and
``verl``, which acts when it is imported.
"""

from importlib import import_module as _import_module

__all__ = [
    "comfyui",
    "context_parallel",
    "diffusers",
    "dtensor",
    "megatron",
    "torch_sdpa",
    "torchtitan",
    "transformers",
]


def __getattr__(name):
    if name in __all__:
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
