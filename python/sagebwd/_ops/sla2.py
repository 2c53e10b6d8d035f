# SPDX-License-Identifier: Apache-2.0
"""Both branches of sparse-linear attention and their mix as one operator in each direction. Tensors
are [b, h, n, d].

``sagebwd::sla2_fwd`` gives (out, sparse, lse, norm, codes, averages). Autograd keeps the last five.
Averages are what the backward of the linear branch would otherwise make of k and v again;
:func:`keeps_averages` says when they are worth their memory. ``sagebwd::sla2_bwd`` gives the
gradients of q, k, v and α.

On a GPU what lies between the branches does not pass through memory: the linear branch writes the
mixed output, and its backward adds the gradients of the sparse branch to its own.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import attention, attention_shapes, linear
from .call import call, refuse, refuse_transforms

_ops = torch.ops.sagebwd


class Options(NamedTuple):
    """The operator arguments that follow the tensors, in order."""

    causal: bool
    recipe: str
    seed: int
    list_index: Tensor
    list_count: Optional[Tensor]
    lead: int
    excluded_index: Tensor
    excluded_count: Optional[Tensor]
    block_q: int
    block_k: int
    mean_free_keys: bool
    alpha_block: int
    deterministic: bool

    def sparse(self):
        """Those of sagebwd::fwd and sagebwd::bwd, up to the lists."""
        return attention.Options(
            causal=self.causal,
            recipe=self.recipe,
            seed=self.seed,
            list_index=self.list_index,
            list_count=self.list_count,
            block_q=self.block_q,
            block_k=self.block_k,
            lead=self.lead,
        )


_TENSORS = tuple(
    map(
        Options._fields.index,
        ("list_index", "list_count", "excluded_index", "excluded_count"),
    )
)


def mixes(q):
    """Whether a kernel mixes tensors like q."""
    return q.is_cuda and linear.has_kernel(q)


def keeps_averages(d, block_q):
    """Whether the averages of a call, a matrix d × d for each block of queries, are no larger than
    q. The output of the linear branch, which nobody has to keep, is as large."""
    return d <= block_q


def averages_bytes(q, k, block_q):
    """Size of the averages of a call for fake tensors, whose shapes may be symbols. Real calls ask
    the library (averages_size in sagebwd/linear.h)."""
    b, h, n, d = q.shape
    blocks = (n + block_q - 1) // block_q
    return b * h * blocks * d * (2 * d + 4) + b * k.shape[1] * (8 * d + 4)


def attend(q, k, v, alpha, options, save_codes):
    """α · sparse + (1 - α) · linear; differentiable in q, k, v and α.

    alpha is float32 [b or 1, h, rows], one number for every ``alpha_block`` queries (a multiple of
    64)."""
    if not torch.compiler.is_compiling():
        refuse_transforms()
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, alpha))
    codes = wanted and save_codes and attention.codes_suffice(options.recipe)
    averages = wanted and keeps_averages(q.shape[-1], options.block_q)
    return call(_ops.sla2_fwd.default, q, k, v, alpha, *options, codes, averages)[0]


# --- fake kernels ---------------------------------------------------------------------------------


def _check(q, k, v, alpha, options):
    attention_shapes.check_shapes(q, k, v, options.sparse(), one_head_dim=True)
    attention_shapes.check_lists(q, options.excluded_index, options.excluded_count)
    block = options.alpha_block
    rows = (q.shape[2] + block - 1) // block
    if (
        alpha.dim() != 3
        or alpha.dtype != torch.float32
        or alpha.device != q.device
        or alpha.shape[0] not in (1, q.shape[0])
        or alpha.shape[1:] != (q.shape[1], rows)
    ):
        raise ValueError(
            f"alpha: expected float32 of shape [1 or {q.shape[0]}, {q.shape[1]}, {rows}] on the "
            f"device of q, got {alpha.dtype} {tuple(alpha.shape)} on {alpha.device}"
        )


@torch.library.register_fake("sagebwd::sla2_fwd")
def _forward_fake(q, k, v, alpha, *rest):
    *options, save_codes, save_averages = rest
    options = Options(*options)
    _check(q, k, v, alpha, options)
    floats = lambda: q.new_empty(q.shape[:3], dtype=torch.float32)
    codes = attention.codes_bytes(q, k, v, None) if save_codes else 0
    averages = averages_bytes(q, k, options.block_q) if save_averages else 0
    return (
        *(torch.empty_like(q), torch.empty_like(q), floats(), floats()),
        *(q.new_empty((size,), dtype=torch.uint8) for size in (codes, averages)),
    )


@torch.library.register_fake("sagebwd::sla2_bwd")
def _backward_fake(dout, q, k, v, alpha, sparse, lse, norm, codes, averages, *rest):
    *options, with_dalpha = rest
    _check(q, k, v, alpha, Options(*options))
    dalpha = alpha.new_empty(alpha.shape if with_dalpha else (0,))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dalpha


# --- autograd -------------------------------------------------------------------------------------


def _setup_context(ctx, inputs, output):
    q, k, v, alpha, *options, save_codes, save_averages = inputs
    _, sparse, lse, norm, codes, averages = output
    ctx.mark_non_differentiable(sparse, lse, norm, codes, averages)
    ctx.set_materialize_grads(False)
    lists = (options[i] for i in _TENSORS)
    ctx.save_for_backward(q, k, v, alpha, sparse, lse, norm, codes, averages, *lists)
    for i in _TENSORS:
        options[i] = None
    ctx.options, ctx.saves = options, (save_codes, save_averages)


def _gradients(ctx, dout, *_):
    count = 4 + len(Options._fields) + 2
    if dout is None:
        return (None,) * count
    saved = ctx.saved_tensors
    tensors, kept, lists = saved[:7], saved[7:9], saved[9:]
    kept = (t if is_kept else None for t, is_kept in zip(kept, ctx.saves))
    options = list(ctx.options)
    for i, t in zip(_TENSORS, lists):
        options[i] = t
    with_dalpha = ctx.needs_input_grad[3]
    *grads, dalpha = call(_ops.sla2_bwd.default, dout, *tensors, *kept, *options, with_dalpha)
    return *grads, dalpha if with_dalpha else None, *(None,) * (count - 4)


torch.library.register_autograd("sagebwd::sla2_fwd", _gradients, setup_context=_setup_context)
refuse(("sla2_fwd", "sla2_bwd"), backward="sla2_bwd")


# --- operations -----------------------------------------------------------------------------------


def forward_flops(q, k, v, alpha, *rest, **kwargs):
    options = Options(*rest[: len(Options._fields)])
    pairs = attention_shapes.listed_pairs(q, options.sparse())
    return 2 * 2 * q.shape[-1] * pairs + linear.forward_flops(q, k)


def backward_flops(dout, q, k, v, alpha, sparse, lse, norm, codes, averages, *rest, **kwargs):
    options = Options(*rest[: len(Options._fields)])
    pairs = attention_shapes.listed_pairs(q, options.sparse())
    return 5 * 2 * q.shape[-1] * pairs + linear.backward_flops(dout, None, q, k)
