# SPDX-License-Identifier: Apache-2.0
"""INT8 attention behind ``F.scaled_dot_product_attention``.

    with sagebwd.integrations.torch_sdpa.enabled():
        loss = model(batch).loss          # every flash-attention call of PyTorch runs here
        loss.backward()

On the CPU the attention operator is replaced; on CUDA the four flash operators are, through
PyTorch's own registry (``torch.nn.attention``: after :func:`register`,
``activate_flash_attention_impl("sagebwd")`` works as well). With CUDA that covers SDPA,
``varlen_attn`` and everything built on them. PyTorch prefers cuDNN's attention to flash attention on
some GPUs, so that is switched off meanwhile.

A call that cannot run here (a mask, dropout, float64) raises NotImplementedError. ``fallback=True``
sends such calls to the kernel that was replaced, with one warning per reason. Calls that PyTorch
itself does not route to flash attention never arrive here.
"""

import contextlib
import warnings
from dataclasses import dataclass

import torch
from torch.library import Library

from .. import ops
from ..attention import BACKWARD_MATMULS, check_tensors
from ..recipe import as_recipe

NAME = "sagebwd"

_SDPA = "_scaled_dot_product_flash_attention"
_FLASH = "_flash_attention"


@dataclass
class _Settings:
    recipe: str = "vectorwise"
    seed: int = 0
    fallback: bool = False


_settings = _Settings()
_cpu_library = None  # alive while the CPU operators are replaced
_cudnn_was_on = None  # the switch of PyTorch's cuDNN attention, as it was before
_warned = set()


# --- public ---------------------------------------------------------------------------------------


def register():
    """Makes the name ``"sagebwd"`` known to PyTorch's flash registry. Changes no behaviour."""
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_install_cuda)


def activate(*, recipe="vectorwise", backward="int8", fallback=False, devices=("cpu", "cuda")):
    """Routes PyTorch's flash attention here until :func:`restore`. A second call replaces the
    settings."""
    global _settings, _cpu_library, _cudnn_was_on
    for device in devices:
        if device not in ("cpu", "cuda"):
            raise ValueError(f"devices: expected 'cpu' and 'cuda', got {device!r}")
    if backward not in ("int8", "bf16"):
        raise ValueError(f"backward: expected 'int8' or 'bf16', got {backward!r}")
    recipe = as_recipe(recipe)
    restore()
    lifted = BACKWARD_MATMULS if backward == "bf16" else ()
    _settings = _Settings(recipe.text(lifted), recipe.seed, fallback)
    _warned.clear()
    if "cpu" in devices:
        _cpu_library = _install("CPU", _CPU_KERNELS)
    if "cuda" in devices:
        register()
        torch.nn.attention.activate_flash_attention_impl(NAME)
        _cudnn_was_on = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)


def restore():
    """Puts PyTorch's own kernels back. Does nothing when they are in place."""
    global _cpu_library, _cudnn_was_on
    if _cpu_library is not None:
        _cpu_library = None
        _originals.pop("CPU", None)
    if torch.nn.attention.current_flash_attention_impl() == NAME:
        torch.nn.attention.restore_flash_attention_impl()
    if _cudnn_was_on is not None:
        torch.backends.cuda.enable_cudnn_sdp(_cudnn_was_on)
        _cudnn_was_on = None


@contextlib.contextmanager
def enabled(**options):
    """:func:`activate` for the time of a ``with`` block. The backward must run inside it too."""
    activate(**options)
    try:
        yield
    finally:
        restore()


# --- installation ---------------------------------------------------------------------------------

_originals = {}  # device -> operator -> the kernel it had before


def _install(device, kernels):
    # A fallback must not go through the operator, which would come back here: hold the kernels
    # themselves.
    _originals[device] = {
        name: torch.library.get_kernel(f"aten::{name}", device) for name in kernels if _exists(name)
    }
    library = Library("aten", "IMPL", device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced is the purpose
        for name, kernel in kernels.items():
            if _exists(name):
                library.impl(name, kernel, device, allow_override=True)
    return library


def _exists(name):
    return hasattr(torch.ops.aten, name)


class _Handle:
    """What the registry keeps; its ``remove`` puts the operators back."""

    def __init__(self, library):
        self.library = library

    def remove(self):
        self.library = None
        _originals.pop("CUDA", None)


def _install_cuda():
    return _Handle(_install("CUDA", _CUDA_KERNELS))


def _guarded(device, name, args, kwargs, tensors, dropout_p, extra, compute):
    """compute(), or the replaced kernel if the call cannot run here and a fallback was asked
    for."""
    reason = _refusal(tensors, dropout_p, extra)
    if reason is None:
        try:
            return compute()
        except NotImplementedError as error:
            reason = str(error)
    if not _settings.fallback:
        raise NotImplementedError(
            f"sagebwd: {reason} (activate(fallback=True) would use PyTorch's kernel)"
        )
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"sagebwd: PyTorch's attention runs instead: {reason}", stacklevel=4)
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
    return _originals[device][name].call_boxed(key, *args, **kwargs)


def _refusal(tensors, dropout_p, extra):
    """Why a call cannot run here, as far as that shows without asking the library; else None."""
    if dropout_p != 0.0:
        return f"dropout_p={dropout_p} is not supported"
    for name, value in extra.items():
        if value is not None and value is not False:
            return f"{name} is not supported"
    try:
        check_tensors(*tensors, dims=tensors[0].dim())
    except NotImplementedError as error:
        return str(error)
    return None


def _options(
    scale, is_causal, top_left=False, cu_q=None, cu_k=None, max_q=0, max_k=0, left=None, right=None
):
    return ops.Options(
        cu_q,
        cu_k,
        max_q,
        max_k,
        scale,
        is_causal,
        top_left,
        -1 if left is None else left,
        -1 if right is None else right,
        _settings.recipe,
        _settings.seed,
    )


def _rows(*tensors):
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _laid_out(t, like):
    """t with the strides that PyTorch's shape functions promise."""
    return t if t.stride() == like.stride() else like.copy_(t)


def _bshd_like(t):
    return torch.empty_permuted(t.shape, (0, 2, 1, 3), dtype=t.dtype, device=t.device)


# --- the CPU operators: [b, h, s, d], causal mask at the top left ---------------------------------


def _cpu_forward(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, **extra
):
    def compute():
        q, k, v = _rows(query, key, value)
        out, lse, _ = ops.forward(q, k, v, _options(scale, is_causal, top_left=True))
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        return (out if q is query else _laid_out(out, torch.empty_like(query))), lse

    args = (query, key, value, dropout_p, is_causal)
    kwargs = dict(attn_mask=attn_mask, scale=scale, **extra)
    unknown = dict(attn_mask=attn_mask, **extra)
    return _guarded("CPU", f"{_SDPA}_for_cpu", args, kwargs, args[:3], dropout_p, unknown, compute)


def _cpu_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    dropout_p,
    is_causal,
    *,
    attn_mask=None,
    scale=None,
    **extra,
):
    def compute():
        options = _options(scale, is_causal, top_left=True)
        grads = _backward(grad_out, *_rows(query, key, value), out, logsumexp, options)
        return tuple(_laid_out(g, _bshd_like(g)) for g in grads)

    args = (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal)
    kwargs = dict(attn_mask=attn_mask, scale=scale, **extra)
    unknown = dict(attn_mask=attn_mask, **extra)
    return _guarded(
        "CPU", f"{_SDPA}_for_cpu_backward", args, kwargs, args[1:4], dropout_p, unknown, compute
    )


def _backward(dout, q, k, v, out, lse, options):
    deterministic = torch.are_deterministic_algorithms_enabled()
    return ops.backward(dout, q, k, v, out, lse, None, options, deterministic=deterministic)


_CPU_KERNELS = {f"{_SDPA}_for_cpu": _cpu_forward, f"{_SDPA}_for_cpu_backward": _cpu_backward}


# --- the CUDA operators ---------------------------------------------------------------------------


def _no_dropout_state(q):
    """rng state, offset and debug mask, as flash attention returns them without dropout."""
    return (
        torch.zeros((2,), dtype=torch.uint64, device=q.device),
        torch.zeros((), dtype=torch.uint64, device=q.device),
        torch.empty(0, dtype=q.dtype, device=q.device),
    )


def _sdpa_forward(
    query,
    key,
    value,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
    **extra,
):
    def compute():
        q, k, v = _rows(query, key, value)
        out, lse, _ = ops.forward(q, k, v, _options(scale, is_causal))
        out = out if q is query else _laid_out(out, torch.empty_like(query))
        return out, lse, None, None, query.shape[2], key.shape[2], *_no_dropout_state(query)

    args = (query, key, value, dropout_p, is_causal, return_debug_mask)
    unknown = dict(return_debug_mask=return_debug_mask, **extra)
    return _guarded(
        "CUDA", _SDPA, args, dict(scale=scale, **extra), args[:3], dropout_p, unknown, compute
    )


def _sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal,
    philox_seed, philox_offset, *, scale=None, **extra,
):  # fmt: skip
    def compute():
        return _backward(
            grad_out, *_rows(query, key, value), out, logsumexp, _options(scale, is_causal)
        )

    args = (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
            dropout_p, is_causal, philox_seed, philox_offset)  # fmt: skip
    kwargs = dict(scale=scale, **extra)
    return _guarded("CUDA", f"{_SDPA}_backward", args, kwargs, args[1:4], dropout_p, extra, compute)


def _flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale=None,
    window_size_left=None, window_size_right=None, **extra,
):  # fmt: skip
    window = dict(window_size_left=window_size_left, window_size_right=window_size_right)

    def compute():
        options = _flash_options(cum_seq_q, cum_seq_k, max_q, max_k, scale, is_causal, **window)
        q, k, v = _rows(*_heads_first(cum_seq_q, query, key, value))
        out, lse, _ = ops.forward(q, k, v, options)
        (out,) = _heads_first(cum_seq_q, out)
        return out, lse, *_no_dropout_state(query)

    args = (
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
    )
    kwargs = dict(scale=scale, **window, **extra)
    unknown = dict(return_debug_mask=return_debug_mask, **extra)
    return _guarded(
        "CUDA", f"{_FLASH}_forward", args, kwargs, args[:3], dropout_p, unknown, compute
    )


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None, **extra,
):  # fmt: skip
    window = dict(window_size_left=window_size_left, window_size_right=window_size_right)

    def compute():
        options = _flash_options(cum_seq_q, cum_seq_k, max_q, max_k, scale, is_causal, **window)
        dout, *qkv, o = _rows(*_heads_first(cum_seq_q, grad_out, query, key, value, out))
        return _heads_first(cum_seq_q, *_backward(dout, *qkv, o, logsumexp, options))

    args = (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
            dropout_p, is_causal, rng_state, unused)  # fmt: skip
    kwargs = dict(scale=scale, **window, **extra)
    return _guarded(
        "CUDA", f"{_FLASH}_backward", args, kwargs, args[1:4], dropout_p, extra, compute
    )


def _flash_out_variant(*args, **kwargs):
    raise NotImplementedError("sagebwd: flash attention into a given output is not supported")


def _flash_options(
    cum_q, cum_k, max_q, max_k, scale, is_causal, window_size_left, window_size_right
):
    window = dict(left=window_size_left, right=window_size_right)
    if cum_q is None:
        return _options(scale, is_causal, **window)
    return _options(scale, is_causal, False, cum_q, cum_k, max_q, max_k, **window)


def _heads_first(cum_seq_q, *tensors):
    """[b, s, h, d] to [b, h, s, d] and back; packed tensors stay."""
    return tensors if cum_seq_q is not None else tuple(t.transpose(1, 2) for t in tensors)


_CUDA_KERNELS = {
    _SDPA: _sdpa_forward,
    f"{_SDPA}_backward": _sdpa_backward,
    f"{_FLASH}_forward": _flash_forward,
    f"{_FLASH}_backward": _flash_backward,
    # Newer PyTorch only. Left alone it would quietly run PyTorch's kernel.
    f"{_FLASH}_forward_no_dropout_inplace": _flash_out_variant,
}
