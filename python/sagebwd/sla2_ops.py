# SPDX-License-Identifier: Apache-2.0
"""Both branches of sparse-linear attention and their mix as one operator, so that what lies between
them need not pass through memory: the linear branch writes the mixed output, and its backward adds
the gradients of the sparse branch to its own. Tensors are [b, h, n, d].

``sagebwd::sla2_fwd`` gives (out, sparse, lse, norm, codes, averages). Autograd keeps the last five.
Averages are what the backward of the linear branch would otherwise make of k and v again;
:func:`keeps_averages` says when they are worth their memory. ``sagebwd::sla2_bwd`` gives the
gradients of q, k, v and α.

Both call other operators. Where no kernel mixes (on a CPU, in float32, with other head dims than 64
and 128), they put the result together from the operators of the branches and of the mix.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import fakes, ops
from .ops import _bwd_backward, _call, _no_vmap, _refuse_transforms, _translated

_ops = torch.ops.sagebwd

_OPTIONS = (
    "bool causal, str recipe, SymInt seed, Tensor list_index, Tensor? list_count, SymInt lead, "
    "Tensor excluded_index, Tensor? excluded_count, SymInt block_q, SymInt block_k, "
    "bool mean_free_keys, SymInt alpha_block, bool deterministic"
)


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
        return ops.Options(
            causal=self.causal,
            recipe=self.recipe,
            seed=self.seed,
            list_index=self.list_index,
            list_count=self.list_count,
            block_q=self.block_q,
            block_k=self.block_k,
            lead=self.lead,
        )

    def linear(self):
        """Those of the operators of the linear branch."""
        return ops.LinearOptions(
            self.excluded_index,
            self.excluded_count,
            self.block_q,
            self.block_k,
            self.mean_free_keys,
        )


_TENSORS = tuple(
    map(
        Options._fields.index,
        ("list_index", "list_count", "excluded_index", "excluded_count"),
    )
)


def mixes(q):
    """Whether a kernel mixes, as far as shapes show it."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in (64, 128)


def keeps_averages(d, block_q):
    """Whether the averages of a call, a matrix d × d for each block of queries, are no larger than
    q. The output of the linear branch, which nobody has to keep, is as large."""
    return d <= block_q


def averages_bytes(q, k, block_q):
    """Size of the averages of a call, from shapes alone (src/spec/averages.h)."""
    b, h, n, d = q.shape
    blocks = (n + block_q - 1) // block_q
    return b * h * blocks * d * (2 * d + 4) + b * k.shape[1] * (8 * d + 4)


def _means(codes, k, recipe):
    """The means of k and v that the sparse branch has left in its codes, [2, b, hk, d]; None where
    there are none. They are the last part of codes (sagebwd/codes.h)."""
    changed = any(word.startswith(("smooth_k=", "smooth_v=")) for word in recipe.split())
    if codes is None or codes.numel() == 0 or changed:
        return None
    b, hk, _, d = k.shape
    return codes[codes.numel() - 8 * b * hk * d :].view(torch.float32).view(2, b, hk, d)


def attend(q, k, v, alpha, options, save_codes):
    """α · sparse + (1 - α) · linear; differentiable in q, k, v and α.

    alpha is float32 [b or 1, h, rows], one number for every ``alpha_block`` queries (a multiple of
    64)."""
    if not torch.compiler.is_compiling():
        _refuse_transforms()
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, alpha))
    codes = wanted and save_codes and ops.codes_suffice(options.recipe)
    averages = wanted and keeps_averages(q.shape[-1], options.block_q)
    return _call(_ops.sla2_fwd.default, q, k, v, alpha, *options, codes, averages)[0]


# --- kernels --------------------------------------------------------------------------------------


def _or_else(kernel, substitute):
    """The kernel's result or, where no implementation serves the call, that of a substitute."""
    try:
        return kernel()
    except RuntimeError as error:
        if not isinstance(_translated(error), NotImplementedError):
            raise
    return substitute()


def _forward(q, k, v, alpha, *rest):
    *options, save_codes, save_averages = rest
    options = Options(*options)
    sparse, lse, _, codes = _ops.fwd.default(
        q, k, v, *options.sparse(), options.deterministic, False, save_codes
    )

    def mixed():
        means = _means(codes, k, options.recipe)
        args = (q, k, v, sparse, alpha, options.alpha_block, *options.linear(), means)
        return _ops.mixed_fwd.default(*args, save_averages)

    def separate():
        linear, norm = _ops.linear_fwd.default(q, k, v, *options.linear())
        out = _ops.mix_fwd.default(sparse, linear, alpha, norm, options.alpha_block)
        size = averages_bytes(q, k, options.block_q) if save_averages else 0
        # Nobody reads these: what has no kernel here has none in the backward. They are NaN.
        return out, norm, q.new_full((size,), 255, dtype=torch.uint8)

    out, norm, averages = _or_else(mixed, separate)
    return out, sparse, lse, norm, codes, averages


def _backward(dout, q, k, v, alpha, sparse, lse, norm, codes, averages, *rest):
    *options, with_dalpha = rest
    options = Options(*options)
    dsparse, parts = _ops.mix_sparse_bwd.default(
        dout, sparse, alpha, norm, options.alpha_block, with_dalpha
    )
    grads = _ops.bwd.default(
        *(dsparse, q, k, v, sparse, lse, None, *options.sparse()),
        *(options.deterministic, False, codes),
    )
    del dsparse

    def mixed():
        parts_or_none = parts if with_dalpha else None
        return _ops.mixed_bwd.default(
            *(dout, q, k, v, alpha, options.alpha_block, *grads),
            *(parts_or_none, averages, *options.linear(), _means(codes, k, options.recipe)),
        )

    def separate():
        linear, _ = _ops.linear_fwd.default(q, k, v, *options.linear())
        _, dlinear, dalpha = _ops.mix_bwd.default(
            dout, sparse, linear, alpha, norm, options.alpha_block, with_dalpha
        )
        others = _ops.linear_bwd.default(dlinear, None, q, k, v, *options.linear())
        return *(a + b for a, b in zip(grads, others)), dalpha

    return _or_else(mixed, separate)


torch.library.define(
    "sagebwd::sla2_fwd",
    f"(Tensor q, Tensor k, Tensor v, Tensor alpha, {_OPTIONS}, bool save_codes, "
    "bool save_averages) -> (Tensor out, Tensor sparse, Tensor lse, Tensor norm, Tensor codes, "
    "Tensor averages)",
)
torch.library.define(
    "sagebwd::sla2_bwd",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor sparse, Tensor lse, "
    f"Tensor norm, Tensor? codes, Tensor? averages, {_OPTIONS}, bool with_dalpha) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dalpha)",
)
for _device in ("CPU", "CUDA"):
    torch.library.impl("sagebwd::sla2_fwd", _device)(_forward)
    torch.library.impl("sagebwd::sla2_bwd", _device)(_backward)


# --- fake kernels ---------------------------------------------------------------------------------


def _check(q, k, v, alpha, options):
    fakes.check_shapes(q, k, v, options.sparse(), one_head_dim=True)
    fakes.check_lists(q, options.excluded_index, options.excluded_count)
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
    codes = ops.codes_bytes(q, k, v, None, options.recipe) if save_codes else 0
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
    *grads, dalpha = _call(_ops.sla2_bwd.default, dout, *tensors, *kept, *options, with_dalpha)
    return *grads, dalpha if with_dalpha else None, *(None,) * (count - 4)


torch.library.register_autograd("sagebwd::sla2_fwd", _gradients, setup_context=_setup_context)
torch.library.register_autograd("sagebwd::sla2_bwd", _bwd_backward)
for _name in ("sla2_fwd", "sla2_bwd"):
    torch.library.register_vmap(f"sagebwd::{_name}", _no_vmap)
