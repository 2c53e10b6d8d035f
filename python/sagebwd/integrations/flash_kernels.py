# SPDX-License-Identifier: Apache-2.0
"""Kernels for the operators behind ``F.scaled_dot_product_attention``: flash attention on the CPU
and on CUDA, forward and backward, with the signatures PyTorch gives them.

:mod:`torch_sdpa` installs them. They serve calls that do not go through
``F.scaled_dot_product_attention`` itself: graphs of torch.compile, ``varlen_attn``, distributed
tensors, calls under a dispatch mode. PyTorch's autograd keeps q, k and v for them, so that codes
are not saved.
"""

import torch

from .. import masks
from . import sdpa_call

SDPA = "_scaled_dot_product_flash_attention"
FLASH = "_flash_attention"


class Kernels:
    """The kernels as methods. ``guarded(device, operator, args, kwargs, reason, compute)`` decides
    between compute() and the original; ``settings()`` gives the current
    :class:`sdpa_call.Settings`."""

    def __init__(self, settings, guarded):
        self._settings, self._guarded = settings, guarded

    def cpu(self):
        return {
            f"{SDPA}_for_cpu": self.cpu_forward,
            f"{SDPA}_for_cpu_backward": self.cpu_backward,
        }

    def cuda(self):
        return {
            SDPA: self.sdpa_forward,
            f"{SDPA}_backward": self.sdpa_backward,
            f"{FLASH}_forward": self.flash_forward,
            f"{FLASH}_backward": self.flash_backward,
            # Newer PyTorch only. If we left it alone, it would quietly run PyTorch's kernel.
            f"{FLASH}_forward_no_dropout_inplace": _flash_out_variant,
        }

    # --- the CPU: [b, h, s, d], causal mask at the top left ---------------------------------------

    def cpu_forward(
        self, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None,
        **extra,
    ):  # fmt: skip
        def compute():
            q, k, v = _rows(query, key, value)
            how = self._cpu_call(query, key, attn_mask, scale, is_causal)
            out, lse = masks.forward(q, k, v, *how, save_codes=False)
            lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
            return _laid_out(out, torch.empty_like(query, device="meta")), lse

        args = (query, key, value, dropout_p, is_causal)
        kwargs = dict(attn_mask=attn_mask, scale=scale, **extra)
        reason = _reason(args[:3], dropout_p, extra)
        return self._guarded("CPU", f"{SDPA}_for_cpu", args, kwargs, reason, compute)

    def cpu_backward(
        self, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None,
        scale=None, **extra,
    ):  # fmt: skip
        def compute():
            q, k, v = _rows(query, key, value)
            how = self._cpu_call(query, key, attn_mask, scale, is_causal)
            grads = masks.backward(grad_out, q, k, v, out, logsumexp, *how)
            return tuple(_laid_out(g, _bshd_like(g)) for g in grads)

        args = (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal)
        kwargs = dict(attn_mask=attn_mask, scale=scale, **extra)
        reason = _reason(args[1:4], dropout_p, extra)
        return self._guarded("CPU", f"{SDPA}_for_cpu_backward", args, kwargs, reason, compute)

    def _cpu_call(self, query, key, mask, scale, is_causal):
        """The options and documents of a call."""
        options = self._options(scale, is_causal, top_left=True)
        return options, masks.read(mask, query, key, is_causal)

    # --- CUDA -------------------------------------------------------------------------------------

    def sdpa_forward(
        self, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
        scale=None, **extra,
    ):  # fmt: skip
        def compute():
            q, k, v = _rows(query, key, value)
            options = self._options(scale, is_causal)
            out, lse = masks.forward(q, k, v, options, save_codes=False)
            out = _laid_out(out, torch.empty_like(query, device="meta"))
            return out, lse, None, None, query.shape[2], key.shape[2], *_no_dropout_state(query)

        args = (query, key, value, dropout_p, is_causal, return_debug_mask)
        kwargs = dict(scale=scale, **extra)
        reason = _reason(args[:3], dropout_p, dict(return_debug_mask=return_debug_mask, **extra))
        return self._guarded("CUDA", SDPA, args, kwargs, reason, compute)

    def sdpa_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, philox_seed, philox_offset, *, scale=None, **extra,
    ):  # fmt: skip
        def compute():
            options = self._options(scale, is_causal)
            return masks.backward(grad_out, *_rows(query, key, value), out, logsumexp, options)

        args = (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
                dropout_p, is_causal, philox_seed, philox_offset)  # fmt: skip
        kwargs = dict(scale=scale, **extra)
        reason = _reason(args[1:4], dropout_p, extra)
        return self._guarded("CUDA", f"{SDPA}_backward", args, kwargs, reason, compute)

    def flash_forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None, **extra,
    ):  # fmt: skip
        documents = (cum_seq_q, cum_seq_k, max_q, max_k)
        window = dict(window_size_left=window_size_left, window_size_right=window_size_right)

        def compute():
            options = self._flash_options(*documents, scale, is_causal, **window)
            q, k, v = _rows(*_heads_first(cum_seq_q, query, key, value))
            out, lse = masks.forward(q, k, v, options, save_codes=False)
            (out,) = _heads_first(cum_seq_q, out)
            return out, lse, *_no_dropout_state(query)

        args = (query, key, value, *documents, dropout_p, is_causal, return_debug_mask)
        kwargs = dict(scale=scale, **window, **extra)
        reason = _reason(args[:3], dropout_p, dict(return_debug_mask=return_debug_mask, **extra))
        return self._guarded("CUDA", f"{FLASH}_forward", args, kwargs, reason, compute)

    def flash_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, rng_state, unused, *, scale=None, window_size_left=None,
        window_size_right=None, **extra,
    ):  # fmt: skip
        documents = (cum_seq_q, cum_seq_k, max_q, max_k)
        window = dict(window_size_left=window_size_left, window_size_right=window_size_right)

        def compute():
            options = self._flash_options(*documents, scale, is_causal, **window)
            dout, q, k, v, o = _rows(*_heads_first(cum_seq_q, grad_out, query, key, value, out))
            grads = masks.backward(dout, q, k, v, o, logsumexp, options)
            return _heads_first(cum_seq_q, *grads)

        args = (grad_out, query, key, value, out, logsumexp, *documents, dropout_p, is_causal,
                rng_state, unused)  # fmt: skip
        kwargs = dict(scale=scale, **window, **extra)
        reason = _reason(args[1:4], dropout_p, extra)
        return self._guarded("CUDA", f"{FLASH}_backward", args, kwargs, reason, compute)

    # --- options ----------------------------------------------------------------------------------

    def _options(self, scale, is_causal, top_left=False):
        return self._settings().options(scale, is_causal, top_left)

    def _flash_options(
        self, cum_q, cum_k, max_q, max_k, scale, is_causal, window_size_left, window_size_right
    ):
        options = self._options(scale, is_causal)._replace(
            window_left=-1 if window_size_left is None else window_size_left,
            window_right=-1 if window_size_right is None else window_size_right,
        )
        if cum_q is None:
            return options
        return options._replace(
            cu_seqlens_q=cum_q, cu_seqlens_k=cum_k, max_seqlen_q=max_q, max_seqlen_k=max_k
        )


def _reason(tensors, dropout_p, extra):
    """Why a call cannot run here, as far as that is known without asking the library; else None."""
    if dropout_p != 0.0:
        return sdpa_call.dropout_reason(dropout_p)
    for name, value in extra.items():
        if value is not None and value is not False:
            return f"{name} is not supported: leave it out"
    return sdpa_call.kernel_reason(*tensors)


def _flash_out_variant(*args, **kwargs):
    raise NotImplementedError(
        "sagebwd: flash attention into a given output is not supported: leave out the output"
    )


def _rows(*tensors):
    return tuple(sdpa_call.rows(t) for t in tensors)


def _laid_out(t, like):
    """t with the strides of a meta tensor: those that PyTorch's shape functions promise."""
    return t if t.stride() == like.stride() else torch.empty_like(like, device=t.device).copy_(t)


def _bshd_like(t):
    return torch.empty_permuted(t.shape, (0, 2, 1, 3), dtype=t.dtype, device="meta")


def _heads_first(cum_seq_q, *tensors):
    """[b, s, h, d] to [b, h, s, d] and back; packed tensors stay."""
    return tensors if cum_seq_q is not None else tuple(t.transpose(1, 2) for t in tensors)


def _no_dropout_state(q):
    """rng state, offset and debug mask, as flash attention returns them without dropout."""
    return (
        torch.zeros((2,), dtype=torch.uint64, device=q.device),
        torch.zeros((), dtype=torch.uint64, device=q.device),
        torch.empty(0, dtype=q.dtype, device=q.device),
    )
