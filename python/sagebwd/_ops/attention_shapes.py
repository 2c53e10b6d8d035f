# SPDX-License-Identifier: Apache-2.0
"""What follows from the shapes of an attention call alone: shapes and strides of the results, which
serve fake tensors (compile, export) and the meta device; operation counts; how distributed tensors
may be sharded. Fake kernels refuse what the kernels would refuse, as far as shapes show it.
"""

import math

import torch

from . import attention as ops


def check_shapes(q, k, v, options, one_head_dim=False):
    cu_seqlens_q, cu_seqlens_k = options.cu_seqlens_q, options.cu_seqlens_k
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q, cu_seqlens_k: expected both or neither")
    dims = 4 if cu_seqlens_q is None else 3
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(t.shape)}")
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(
                f"{name}: expected q's {q.dtype} on {q.device}, got {t.dtype} on {t.device}"
            )
    if (
        k.shape[:-1] != v.shape[:-1]
        or k.shape[-1] != q.shape[-1]
        or (dims == 4 and k.shape[0] != q.shape[0])
    ):
        raise ValueError(
            "q, k, v: expected one head dim of q and k, one batch size, and one shape of k and v "
            f"but for the head dim, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if one_head_dim and v.shape[-1] != q.shape[-1]:
        raise ValueError(f"head dim of v: expected that of q ({q.shape[-1]}), got {v.shape[-1]}")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu is not None and cu.device.type != "cpu" and cu.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device} or the CPU, got {cu.device}")
        if cu is not None and (cu.dim() != 1 or cu.dtype != torch.int32 or cu.shape[0] < 1):
            raise ValueError(
                f"{name}: expected a one-dimensional int32 tensor of at least one entry, got "
                f"{cu.dtype} {tuple(cu.shape)}"
            )
    check_lists(q, options.list_index, options.list_count)


def check_lists(q, index, count):
    if index is None:
        if count is not None:
            raise ValueError("list_count: expected list_index beside it")
        return
    batch = q.shape[0] if q.dim() == 4 else 1
    if (
        index.dim() != 4
        or index.dtype != torch.int32
        or index.device != q.device
        or index.shape[0] not in (1, batch)
        or index.shape[1] not in (1, q.shape[1])
    ):
        raise ValueError(
            "list_index: expected int32 of shape [batch or 1, heads or 1, rows, width] on the "
            f"device of q, got {index.dtype} {tuple(index.shape)} on {index.device}"
        )
    if count is not None and (
        count.shape != index.shape[:3] or count.dtype != torch.int32 or count.device != q.device
    ):
        raise ValueError(
            f"list_count: expected int32 of shape {tuple(index.shape[:3])} on the device of q, got "
            f"{count.dtype} {tuple(count.shape)} on {count.device}"
        )


@torch.library.register_fake("sagebwd::fwd")
def _fwd_fake(q, k, v, *rest):
    *options, _, return_max_logit, save_codes = rest
    options = ops.Options(*options)
    cu_seqlens_q = options.cu_seqlens_q
    check_shapes(q, k, v, options)
    out = ops.empty_out(q, v)
    if cu_seqlens_q is None:
        rows, heads = q.shape[0], q.shape[1]
        lse = q.new_empty((rows, heads, q.shape[2]), dtype=torch.float32)
    else:
        rows, heads = cu_seqlens_q.shape[0] - 1, q.shape[1]
        lse = q.new_empty((heads, q.shape[0]), dtype=torch.float32)
    max_logit = q.new_empty((rows, heads) if return_max_logit else (0,), dtype=torch.float32)
    size = ops.codes_bytes(q, k, v, cu_seqlens_q) if save_codes else 0
    return out, lse, max_logit, q.new_empty((size,), dtype=torch.uint8)


@torch.library.register_fake("sagebwd::bwd")
def _bwd_fake(dout, q, k, v, out, lse, dlse, *rest):
    check_shapes(q, k, v, ops.Options(*rest[: len(ops.Options._fields)]))
    for name, t in (("dout", dout), ("out", out), ("lse", lse), ("dlse", dlse)):
        if t is not None and t.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device}, got {t.device}")
    wanted = (*q.shape[:-1], v.shape[-1])
    for name, t in (("dout", dout), ("out", out)):
        if t.shape != wanted:
            raise ValueError(
                f"{name}: expected q's shape with the head dim of v, {wanted}, got {tuple(t.shape)}"
            )
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# --- operations, as PyTorch counts those of its own attention ---
# A mask does not reduce the count, but a document counts only its own pairs, and block lists count
# listed blocks only.


def forward_flops(q, k, v, cu_q, cu_k, max_q, max_k, *rest, **kwargs):
    channels = q.shape[-1] + v.shape[-1]  # S, O
    return 2 * channels * _pairs(q, k, cu_q, cu_k, max_q, max_k, *rest)


def backward_flops(dout, q, k, v, out, lse, dlse, cu_q, cu_k, max_q, max_k, *rest, **kwargs):
    channels = 3 * q.shape[-1] + 2 * v.shape[-1]  # S', dQ, dK; dV, dP
    return 2 * channels * _pairs(q, k, cu_q, cu_k, max_q, max_k, *rest)


def _pairs(q, k, cu_q, cu_k, max_q, max_k, *rest):
    """(query, key) pairs of all heads."""
    options = ops.Options(cu_q, cu_k, max_q, max_k, *rest[: len(ops.Options._fields) - 4])
    if options.list_index is not None:
        return listed_pairs(q, options)
    if cu_q is None:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    lengths = zip(_lengths(cu_q, max_q, q.shape[0]), _lengths(cu_k, max_k, k.shape[0]))
    return q.shape[1] * sum(a * b for a, b in lengths)


def listed_pairs(q, options):
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


# --- how distributed tensors may be sharded: batches and heads, in whole groups ---


def shard_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest):
    *_, return_max_logit, save_codes = rest
    if save_codes:
        raise _no_codes()
    _refuse_lists(rest)
    choices = []
    for tensor, lse, max_logit in _placements(q, k, v):
        outputs = [tensor, lse, max_logit if return_max_logit else _replicate(), _replicate()]
        offsets = [_whole(cu_seqlens_q), _whole(cu_seqlens_k)]
        choices.append((outputs, [tensor] * 3 + offsets + [None] * len(rest)))
    return choices


def shard_backward(dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, *rest):
    if rest[-1] is not None:
        raise _no_codes()
    _refuse_lists(rest)
    choices = []
    for tensor, stats, _ in _placements(q, k, v):
        inputs = [tensor] * 5 + [stats, None if dlse is None else stats]
        offsets = [_whole(cu_seqlens_q), _whole(cu_seqlens_k)]
        choices.append(([tensor] * 3, inputs + offsets + [None] * len(rest)))
    return choices


def _refuse_lists(rest):
    """`rest` follows the two tensors of document offsets."""
    if rest[ops.Options._fields.index("list_index") - 2] is not None:
        raise NotImplementedError(
            "sagebwd: block lists of distributed tensors are not supported: call attention on "
            "local tensors (to_local)"
        )


def _no_codes():
    """Codes of one rank are no part of those of all ranks. PyTorch would cut or gather them as if
    they were, and the gradients would be wrong without an error."""
    return NotImplementedError(
        "sagebwd: codes of distributed tensors are not supported: keep q, k and v for the backward "
        "(save_codes=False)"
    )


def _replicate():
    from torch.distributed.tensor import Replicate

    return Replicate()


def _whole(offsets):
    return None if offsets is None else _replicate()


def _placements(q, k, v):
    """How q (and all tensors of its layout), lse and max_logit may be placed on one dimension of a
    mesh."""
    from torch.distributed.tensor import Shard

    packed = len(q.shape) == 3
    yield _replicate(), _replicate(), _replicate()
    if not packed:
        yield Shard(0), Shard(0), Shard(0)
    if _whole_groups(q, k, v):
        # [b, h, n, d], [b, h, n], [b, h]; packed [t, h, d], [h, t], [documents, h]
        yield Shard(1), Shard(0 if packed else 1), Shard(1)


def _whole_groups(q, k, v):
    """Whether the key heads divide evenly over the ranks that the heads are sharded over."""
    sharded = [
        any(placement.is_shard(1) for placement in placements)
        for placements in zip(q.placements, k.placements, v.placements)
    ]
    ranks = math.prod(n for n, here in zip(q.mesh.shape, sharded) if here)
    return k.shape[1] % ranks == 0
