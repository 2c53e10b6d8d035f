# SPDX-License-Identifier: Apache-2.0
"""How an operator is called: its errors, and what no operator of this library can do."""

import torch

_KINDS = {"sagebwd.ValueError: ": ValueError, "sagebwd.NotImplementedError: ": NotImplementedError}


def call(op, *args):
    """Calls an operator."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        raise _translated(error) from None


def call_kernel(op, *args):
    """Calls an operator past its registered autograd formula, which is written in Python and costs
    more than the rest of a call."""
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    except RuntimeError as error:
        raise _translated(error) from None


def _translated(error):
    """PyTorch has one exception for all errors of C++ code; the first word of its message says
    which kind it is."""
    message = str(error)
    for prefix, kind in _KINDS.items():
        if message.startswith(prefix):
            return kind(message[len(prefix) :].split("\nException raised from")[0])
    return error


def refuse_transforms():
    """Refuses torch.func and forward-mode AD, which would otherwise give zero tangents or fail with
    an error that names no remedy."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "sagebwd: torch.func transforms (grad, vjp, jvp, vmap, ...) are not supported; use "
            "loss.backward() or torch.autograd.grad, and fold a mapped dimension into the batch"
        )
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            "sagebwd: forward-mode automatic differentiation is not supported"
        )


def is_distributed(t):
    """Whether a tensor is a DTensor, without importing that. Their calls keep q, k and v: codes
    cannot be cut or gathered as PyTorch may want to."""
    return hasattr(t, "device_mesh")


def _no_second_gradients(ctx, *grads):
    raise NotImplementedError(
        "sagebwd: the backward of attention cannot be differentiated again (double backward: "
        "create_graph=True, gradient penalties, Hessians); compute such a term with "
        "F.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    )


def _no_vmap(info, in_dims, *args):
    raise NotImplementedError(
        "sagebwd: torch.vmap is not supported; attention is batched already, fold the mapped "
        "dimension into the batch dimension"
    )


def refuse(names, backward):
    """Registers what operators refuse: vmap, and ``backward`` to be differentiated."""
    for name in names:
        torch.library.register_vmap(f"sagebwd::{name}", _no_vmap)
    torch.library.register_autograd(f"sagebwd::{backward}", _no_second_gradients)
