# SPDX-License-Identifier: Apache-2.0
"""What the operators of ops.py give for tensors without data: shapes and strides. This serves fake
tensors (compile, export) and the meta device. It refuses what the kernels would refuse, as far as
shapes show it."""

import torch

from . import ops


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
    size = ops.codes_bytes(q, k, v, cu_seqlens_q, options.recipe) if save_codes else 0
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
