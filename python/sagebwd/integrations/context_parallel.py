# SPDX-License-Identifier: Apache-2.0
"""Ring attention: one sequence spread over several ranks. PyTorch does the rotation, the merging
and the load balancing.

Inside PyTorch's own context-parallel scope:

    from torch.distributed.tensor.experimental import context_parallel
    from sagebwd.integrations import context_parallel as sage
    with sage.enabled(), context_parallel(mesh, buffers=..., buffer_seq_dims=...):
        loss = model(batch)       # F.scaled_dot_product_attention becomes a ring of INT8 attention
        loss.backward()

or called directly on the local shards: :func:`ring_attention`.

Each step of the backward sees part of the keys and the log-sum-exp of all of them. Rows of its dS
do not sum to zero, so the mean key that smoothing subtracts must be added back (``partial_kv``).
Without that, the error of dq would be as large as the mean of the keys.
"""

import contextlib

import torch

from .. import arguments, padding
from .._ops import attention as ops
from ..attention import BACKWARD_MATMULS
from ..recipe import as_recipe
from .report import Report

_SEQUENCE = 2  # of [b, h, s, d]


def _torch_ring():
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError as error:
        raise NotImplementedError(
            f"sagebwd: this PyTorch ({torch.__version__}) keeps its ring attention elsewhere: use "
            "one that has torch.distributed.tensor.experimental._context_parallel"
        ) from error
    return _attention


def _options(causal, scale, recipe, backward, softcap=None):
    if backward not in ("int8", "bf16"):
        raise ValueError(f"backward: expected 'int8' or 'bf16', got {backward!r}")
    recipe = as_recipe(recipe)
    return ops.Options(
        softmax_scale=arguments.scale("softmax_scale", scale),
        causal=arguments.flag("causal", causal),
        recipe=recipe.text(BACKWARD_MATMULS if backward == "bf16" else ()),
        seed=recipe.seed,
        softcap=arguments.softcap(softcap),
    )


def _forward(group, options, q, k, v):
    """(out, lse) of the local queries over the keys of all ranks."""

    def step(q, k, v, is_causal):
        call = (_rows(q), _rows(k), _rows(v), options._replace(causal=is_causal))
        return padding.forward(*call, save_codes=False)[:2]  # the ring keeps q, k and v

    out, lse = _torch_ring()._templated_ring_attention(
        group, _SEQUENCE, step, query=q, key=k, value=v, is_causal=options.causal
    )
    return out, lse


def _backward(group, options, dout, q, k, v, out, lse):
    def step(*, grad_out, query, key, value, out, logsumexp, is_causal):
        return padding.backward(
            grad_out,
            _rows(query),
            _rows(key),
            _rows(value),
            out,
            logsumexp,
            None,
            options._replace(causal=is_causal),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            partial_kv=True,
        )

    return _torch_ring()._templated_ring_attention_backward(
        group, _SEQUENCE, step, dout, "grad_out", q, k, v, out, lse, options.causal
    )[:3]


def _rows(t):
    return t if t.stride(-1) == 1 else t.contiguous()


# --- called directly ------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, options, load_balance):
        with _balanced(load_balance):
            out, lse = _forward(group, options, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = (group, options, load_balance)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        group, options, load_balance = ctx.call
        with _balanced(load_balance):
            grads = _backward(group, options, dout, *ctx.saved_tensors)
        return (*grads, None, None, None)


@contextlib.contextmanager
def _balanced(load_balance):
    options = _torch_ring()._cp_options
    before, options.enable_load_balance = options.enable_load_balance, load_balance
    try:
        yield
    finally:
        options.enable_load_balance = before


def ring_attention(
    q,
    k,
    v,
    group,
    *,
    causal=False,
    softmax_scale=None,
    softcap=None,
    load_balance=False,
    recipe="vectorwise",
    backward="int8",
):
    """Attention of a sequence that is split over the ranks of ``group``: q, k, v are this rank's
    [b, h, s, d].

    Rank r holds the r-th piece. With ``load_balance`` (causal only) the sequence is cut into twice
    as many pieces, and rank r holds pieces r and 2·ranks - 1 - r, as in PyTorch's
    ``context_parallel``.
    """
    return _Ring.apply(
        q,
        k,
        v,
        group,
        _options(causal, softmax_scale, recipe, backward, softcap),
        arguments.flag("load_balance", load_balance),
    )


# --- inside PyTorch's context-parallel scope ------------------------------------------------------


@contextlib.contextmanager
def enabled(*, recipe="vectorwise", backward="int8"):
    """Within a ``with`` block, PyTorch's ``context_parallel`` computes its ring steps here, on the
    CPU and on CUDA. Enter it before ``context_parallel``; the backward must run inside. The block
    gets a :class:`~sagebwd.integrations.report.Report`, and warns at its end if no ring ran."""
    from torch.distributed.tensor import DTensor

    aten = torch.ops.aten
    seen = Report("context_parallel")

    def on_mesh(q, results):
        return tuple(
            DTensor.from_local(t, q.device_mesh, q.placements, run_check=False) for t in results
        )

    def local(*tensors):
        return tuple(t.to_local() for t in tensors)

    def refuse(dropout_p, **extra):
        given = [name for name, value in extra.items() if value is not None and value is not False]
        if dropout_p or given:
            what = ", ".join(given) or f"dropout {dropout_p}"
            seen.refused[what] += 1
            raise NotImplementedError(
                f"sagebwd: ring attention with {what} is not supported: use no padding and no "
                "attention dropout, or leave out this hook to run PyTorch's own ring"
            )

    def forward(op, args, kwargs):
        def call(
            q,
            k,
            v,
            dropout_p=0.0,
            is_causal=False,
            return_debug_mask=False,
            *,
            attn_mask=None,
            scale=None,
        ):
            refuse(dropout_p, attn_mask=attn_mask, return_debug_mask=return_debug_mask)
            options = _options(is_causal, scale, recipe, backward)
            seen.ran()
            out, lse = on_mesh(q, _forward(q.device_mesh.get_group(), options, *local(q, k, v)))
            if op == aten._scaled_dot_product_flash_attention_for_cpu.default:
                return out, lse
            state = torch.zeros(2, dtype=torch.uint64, device=out.device)
            return out, lse, None, None, q.shape[2], k.shape[2], state, state[0], torch.empty(0)

        return call(*args, **kwargs)

    def differentiate(dout, q, k, v, out, lse, is_causal, scale):
        options = _options(is_causal, scale, recipe, backward)
        return on_mesh(
            q, _backward(q.device_mesh.get_group(), options, *local(dout, q, k, v, out, lse))
        )

    def cpu_backward(op, args, kwargs):
        def call(dout, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
            refuse(dropout_p, attn_mask=attn_mask)
            return differentiate(dout, q, k, v, out, lse, is_causal, scale)

        return call(*args, **kwargs)

    def cuda_backward(op, args, kwargs):
        def call(
            dout,
            q,
            k,
            v,
            out,
            lse,
            cu_q,
            cu_k,
            max_q,
            max_k,
            dropout_p,
            is_causal,
            seed,
            offset,
            *,
            scale=None,
        ):
            refuse(dropout_p)
            return differentiate(dout, q, k, v, out, lse, is_causal, scale)

        return call(*args, **kwargs)

    handlers = {
        aten._scaled_dot_product_flash_attention.default: forward,
        aten._scaled_dot_product_flash_attention_backward.default: cuda_backward,
        aten._scaled_dot_product_flash_attention_for_cpu.default: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: cpu_backward,
    }
    ring = _torch_ring()
    before = dict(ring.custom_ops)
    ring.custom_ops.update(handlers)
    try:
        yield seen
    finally:
        ring.custom_ops.clear()
        ring.custom_ops.update(before)
    seen.close(
        "It replaces the flash attention of PyTorch's context_parallel: enter that inside of this "
        "block, and leave PyTorch no reason to take its math kernel (dropout, masks)"
    )
