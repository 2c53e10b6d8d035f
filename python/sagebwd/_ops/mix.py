# SPDX-License-Identifier: Apache-2.0
"""The operators around the two branches of sparse-linear attention. Tensors are [b, h, n, d].

``sagebwd::mix_fwd`` gives out = α · sparse + (1 - α) · linear, and ``sagebwd::mix_bwd`` the
gradients of sparse, linear and α in one pass. The router has ``sagebwd::block_means``, the means of
blocks of q and k, and ``sagebwd::top_k``, the largest of many scores.
"""

import torch

from .call import call, refuse, refuse_transforms

_ops = torch.ops.sagebwd


def mix(sparse, linear, alpha, norm=None, block=1):
    """α · sparse + (1 - α) · linear; differentiable in all three.

    alpha is float32 [b or 1, h, rows], one number for every ``block`` queries (1 or a multiple of
    64). norm is float32 [b, h, n]: where it is 0, α counts as 1 and linear as 0.
    """
    if not torch.compiler.is_compiling():
        refuse_transforms()
    return call(_ops.mix_fwd.default, sparse, linear, alpha, norm, block)


def block_means(q, k, block_q, block_k, mean_free_keys):
    """Means of blocks in float32, [b, h, rows, d] and [b, hk, key blocks, d], without gradient."""
    return call(_ops.block_means.default, q.detach(), k.detach(), block_q, block_k, mean_free_keys)


#: The most columns that ``top_k`` takes on a GPU (sagebwd/mix.h).
MOST_COLUMNS = 8192


def top_k(scores, k):
    """(index, count) of the k largest of each row of float32 [b, h, rows, columns], largest first:
    int32 [b, h, rows, k], and how many of them are above -inf."""
    return call(_ops.top_k.default, scores.detach(), k)


def _check(sparse, linear, alpha, norm, block):
    if sparse.dim() != 4 or linear.shape != sparse.shape:
        raise ValueError(
            "sparse, linear: expected one shape [b, h, n, d], got "
            f"{tuple(sparse.shape)} and {tuple(linear.shape)}"
        )
    for name, t in (("linear", linear), ("alpha", alpha), ("norm", norm)):
        if t is not None and t.device != sparse.device:
            raise ValueError(f"{name}: expected the device {sparse.device}, got {t.device}")
    if linear.dtype != sparse.dtype:
        raise ValueError(f"linear: expected {sparse.dtype}, got {linear.dtype}")
    b, h, n, _ = sparse.shape
    rows = (n + block - 1) // block
    for name, t, batches, size in (("alpha", alpha, (1, b), rows), ("norm", norm, (b,), n)):
        if t is not None and (
            t.dim() != 3
            or t.dtype != torch.float32
            or t.shape[0] not in batches
            or t.shape[1:] != (h, size)
        ):
            raise ValueError(
                f"{name}: expected float32 of shape [{' or '.join(map(str, batches))}, {h}, "
                f"{size}], got {t.dtype} {tuple(t.shape)}"
            )


@torch.library.register_fake("sagebwd::mix_fwd")
def _mix_fwd_fake(sparse, linear, alpha, norm, block):
    _check(sparse, linear, alpha, norm, block)
    return torch.empty_like(sparse)


@torch.library.register_fake("sagebwd::mix_bwd")
def _mix_bwd_fake(dout, sparse, linear, alpha, norm, block, with_dalpha):
    _check(sparse, linear, alpha, norm, block)
    dalpha = alpha.new_empty(alpha.shape if with_dalpha else (0,))
    return torch.empty_like(sparse), torch.empty_like(linear), dalpha


@torch.library.register_fake("sagebwd::block_means")
def _block_means_fake(q, k, block_q, block_k, mean_free_keys):
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q, k: expected [b, h, n, d] with one batch size and head dim, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    means = lambda x, block: x.new_empty(
        (x.shape[0], x.shape[1], (x.shape[2] + block - 1) // block, x.shape[3]),
        dtype=torch.float32,
    )
    return means(q, block_q), means(k, block_k)


@torch.library.register_fake("sagebwd::top_k")
def _top_k_fake(scores, k):
    if scores.dim() != 4 or scores.dtype != torch.float32:
        raise ValueError(
            "scores: expected float32 of shape [batch, heads, rows, columns], got "
            f"{scores.dtype} {tuple(scores.shape)}"
        )
    empty = lambda shape: scores.new_empty(shape, dtype=torch.int32)
    return empty((*scores.shape[:3], k)), empty(scores.shape[:3])


def _setup_context(ctx, inputs, output):
    *tensors, ctx.block = inputs
    ctx.save_for_backward(*tensors)


def _mix_fwd_backward(ctx, dout):
    with_dalpha = ctx.needs_input_grad[2]
    dsparse, dlinear, dalpha = call(
        _ops.mix_bwd.default, dout, *ctx.saved_tensors, ctx.block, with_dalpha
    )
    return dsparse, dlinear, dalpha if with_dalpha else None, None, None


torch.library.register_autograd("sagebwd::mix_fwd", _mix_fwd_backward, setup_context=_setup_context)
refuse(("mix_fwd", "mix_bwd", "block_means", "top_k"), backward="mix_bwd")
