# SPDX-License-Identifier: Apache-2.0
"""The operators of the linear branch. Tensors are [b, h, n, d].

``sagebwd::linear_fwd`` gives (out, norm), and ``sagebwd::linear_bwd`` gives (dq, dk, dv) from q, k,
v and the gradients of both. They are the kernels of the library. ``sagebwd::linear_matmuls_fwd``
and ``sagebwd::linear_matmuls_bwd`` are the same made of PyTorch's matmuls (matmuls.py), for
what has no kernel on a GPU: float32, and other head dims than 64 and 128. :func:`forward` decides
by dtype and head dim, before the call; the matmuls say once that they serve a kind of tensors, and
refuse where SAGEBWD_IMPL names an implementation.
"""

import os
import warnings
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import attention, attention_shapes, matmuls
from .call import call, refuse, refuse_transforms

_ops = torch.ops.sagebwd


class Options(NamedTuple):
    """The operator arguments that follow the tensors, in order."""

    list_index: Optional[Tensor] = None
    list_count: Optional[Tensor] = None
    block_q: int = 128
    block_k: int = 64
    mean_free_keys: bool = True


#: By dtype: the head dims that have kernels on a GPU. Asked once, because compilers cannot follow
#: the question.
_HEAD_DIMS = {
    dtype: tuple(map(int, _ops.linear_head_dims(name).split()))
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32"))
}


def has_kernel(q):
    """Whether a kernel of the library serves tensors like q."""
    return not q.is_cuda or q.shape[-1] in _HEAD_DIMS.get(q.dtype, ())


def operators(q):
    """(forward, backward) for tensors like q."""
    if has_kernel(q):
        return _ops.linear_fwd.default, _ops.linear_bwd.default
    return _ops.linear_matmuls_fwd.default, _ops.linear_matmuls_bwd.default


def forward(q, k, v, options):
    """(out, norm) of the linear branch; differentiable in q, k, v through both."""
    if not torch.compiler.is_compiling():
        refuse_transforms()
    return call(operators(q)[0], q, k, v, *options)


# --- PyTorch's matmuls ----------------------------------------------------------------------------


_announced = set()


def _announce(q, k, v, *options):
    """Says once for a kind of tensors that no kernel serves them, and why. Whoever pins an
    implementation gets that one or an error."""
    kind, pinned = (q.dtype, q.shape[-1]), os.environ.get("SAGEBWD_IMPL")
    if kind in _announced and not pinned:
        return
    reasons = call(_ops.linear_refusal.default, q, k, v, *options)
    if pinned and reasons:
        raise NotImplementedError(
            f"sagebwd: SAGEBWD_IMPL pins {pinned}, so PyTorch's matmuls do not make the linear "
            f"branch in its place:{reasons}"
        )
    _announced.add(kind)
    if reasons:
        warnings.warn(
            f"sagebwd: PyTorch's matmuls make the linear branch of {q.dtype} with head dim "
            f"{q.shape[-1]}, because no kernel serves it:{reasons}",
            stacklevel=2,
        )


def _matmuls_forward(q, k, v, *options):
    _announce(q, k, v, *options)
    return matmuls.forward(q, k, v, *options)


def _matmuls_backward(dout, dnorm, q, k, v, *options):
    return matmuls.backward(dout, dnorm, q, k, v, *options)


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? list_index, Tensor? list_count, SymInt block_q, "
    "SymInt block_k, bool mean_free_keys"
)
torch.library.define("sagebwd::linear_matmuls_fwd", f"({_INPUTS}) -> (Tensor out, Tensor norm)")
torch.library.define(
    "sagebwd::linear_matmuls_bwd",
    f"(Tensor dout, Tensor? dnorm, {_INPUTS}) -> (Tensor dq, Tensor dk, Tensor dv)",
)
for _device in ("CPU", "CUDA"):
    torch.library.impl("sagebwd::linear_matmuls_fwd", _device)(_matmuls_forward)
    torch.library.impl("sagebwd::linear_matmuls_bwd", _device)(_matmuls_backward)


# --- fake kernels ---------------------------------------------------------------------------------


def _check(q, k, v, options):
    lists = attention.Options(list_index=options.list_index, list_count=options.list_count)
    attention_shapes.check_shapes(q, k, v, lists, one_head_dim=True)


def _forward_fake(q, k, v, *options):
    _check(q, k, v, Options(*options))
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_fake(dout, dnorm, q, k, v, *options):
    _check(q, k, v, Options(*options))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# --- autograd -------------------------------------------------------------------------------------


def _setup_context(ctx, inputs, output):
    q, k, v, index, count, *rest = inputs
    ctx.save_for_backward(q, k, v, index, count)
    ctx.options = rest
    ctx.set_materialize_grads(False)


def _gradients_by(backward):
    def gradients(ctx, dout, dnorm):
        if dout is None and dnorm is None:
            return (None,) * (3 + len(Options._fields))
        q, k, v, index, count = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(q)
        args = (dout, dnorm, q, k, v, index, count, *ctx.options)
        return *call(backward, *args), *(None,) * len(Options._fields)

    return gradients


for _fwd, _bwd in (("linear_fwd", "linear_bwd"), ("linear_matmuls_fwd", "linear_matmuls_bwd")):
    torch.library.register_fake(f"sagebwd::{_fwd}", _forward_fake)
    torch.library.register_fake(f"sagebwd::{_bwd}", _backward_fake)
    torch.library.register_autograd(
        f"sagebwd::{_fwd}",
        _gradients_by(getattr(_ops, _bwd).default),
        setup_context=_setup_context,
    )
    refuse((_fwd, _bwd), backward=_bwd)


# --- operations -----------------------------------------------------------------------------------


def forward_flops(q, k, *rest, **kwargs):
    """The sums of the key blocks and the product with the queries. How the blocks are added up is
    the implementation's business."""
    tokens = q.shape[0] * (q.shape[1] * q.shape[2] + k.shape[1] * k.shape[2])
    return 2 * tokens * q.shape[-1] ** 2


def backward_flops(dout, dnorm, q, k, *rest, **kwargs):
    return 3 * forward_flops(q, k)  # both again, and two gradients of each
