# SPDX-License-Identifier: Apache-2.0
"""INT8 attention behind ``F.scaled_dot_product_attention``.

    with sagebwd.integrations.torch_sdpa.enabled() as seen:
        loss = model(batch).loss          # every call of PyTorch's attention runs here
    loss.backward()
    print(seen)                           # how many calls ran here, which did not and why

**What runs here.** Calls of ``F.scaled_dot_product_attention``, from Python or from C++
(nn.MultiheadAttention, nn.Transformer, transformers with ``attn_implementation="sdpa"``, …), on
the CPU and on CUDA, whichever kernel PyTorch would have chosen. Masks may describe padding, a
causal mask, a window, documents, or few sets of queries that see the same keys
(:mod:`sagebwd.masks`). Head dims are padded to a multiple of 8. While the hook is active, PyTorch's
inference fast path of nn.MultiheadAttention and nn.TransformerEncoder is switched off, because it
would bypass the hook.

**What does not.** Dropout, other masks and biases, float64, head dims above 256, nested tensors and
``nn.MultiheadAttention(need_weights=True)`` raise a NotImplementedError that names the remedy. With
``fallback=True`` such calls run PyTorch's attention, with one warning per reason. If
``sdpa_kernel`` or ``torch.backends.cuda.enable_flash_sdp(False)`` excludes flash attention, PyTorch
runs the calls, with a warning. A block of :func:`enabled` that saw no call at all warns at its end.

**torch.compile.** Compiled graphs contain PyTorch's flash operator; while the hook is active, its
kernels are ours. The backward of a compiled graph must therefore run inside the block too, or
PyTorch's kernel computes it. The backward of eager code may run anywhere, except with activation
checkpointing, whose backward computes the forward again.

Code that calls ``F.scaled_dot_product_attention`` is compiled once for inside the block and once
for outside. Code that imported the function by name has one graph for both; calls in it that
PyTorch does not give to flash attention (dropout) are not seen. On CUDA, PyTorch never gives
masked, float32 or unequal causal calls to flash attention, so they are refused in compiled code.

**Scope.** There is one hook for the whole process. Blocks may be nested, and may overlap in several
threads; the one entered last gives the settings. On CUDA the flash operators are replaced through
PyTorch's own registry (``torch.nn.attention``), and cuDNN's attention is switched off meanwhile.
After :func:`register`, ``activate_flash_attention_impl("sagebwd")`` works too, for the calls that
PyTorch gives to flash attention.
"""

import contextlib
import functools
import threading
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.library import Library
from torch.overrides import has_torch_function

from .. import masks, padding
from .._ops.call import refuse_transforms
from . import sdpa_call
from .flash_kernels import Kernels
from .report import Report

NAME = "sagebwd"

_NO_CALL = (
    "It replaces F.scaled_dot_product_attention; the model computes attention by other means, or "
    "not in this block (transformers: attn_implementation='sdpa'; diffusers: "
    "sagebwd.integrations.diffusers; else call sagebwd.attention in the model)"
)
_EXCLUDED = (
    "sdpa_kernel() or enable_flash_sdp(False) excludes flash attention here: allow "
    "SDPBackend.FLASH_ATTENTION"
)
_NEED_WEIGHTS = (
    "nn.MultiheadAttention(need_weights=True) computes the attention weights themselves: call it "
    "with need_weights=False"
)


class _Activation(NamedTuple):
    settings: sdpa_call.Settings
    devices: tuple
    seen: Report
    scoped: bool  # by enabled(), which ends it


_active = []  # the last one counts
_lock = threading.RLock()
# Of the current thread. passing: None outside of PyTorch's original function, else whether the
# kernels below it are PyTorch's too. went_to_math: whether it ended in the math kernel.
_here = threading.local()


# --- public ---------------------------------------------------------------------------------------


def register():
    """Makes the name ``"sagebwd"`` known to PyTorch's flash registry. Changes no behaviour."""
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_install_cuda)


def activate(*, recipe="vectorwise", backward="int8", fallback=False, devices=("cpu", "cuda")):
    """Routes PyTorch's attention here until :func:`restore`, and returns the
    :class:`~sagebwd.integrations.report.Report` of what it sees. A second call replaces the
    settings."""
    return _push(False, recipe, backward, fallback, devices).seen


def restore():
    """Puts PyTorch's own attention back. Does nothing when it is in place."""
    with _lock:
        _active.clear()
        _follow()


@contextlib.contextmanager
def enabled(*, recipe="vectorwise", backward="int8", fallback=False, devices=("cpu", "cuda")):
    """:func:`activate` for the time of a ``with`` block, which gets the Report."""
    activation = _push(True, recipe, backward, fallback, devices)
    try:
        yield activation.seen
    finally:
        with _lock:
            _active[:] = [a for a in _active if a is not activation]
            _follow()
    activation.seen.close(_NO_CALL)


def _push(scoped, recipe, backward, fallback, devices):
    for device in devices:
        if device not in ("cpu", "cuda"):
            raise ValueError(f"devices: expected 'cpu' and 'cuda', got {device!r}")
    settings = sdpa_call.Settings.of(recipe, backward, fallback)
    activation = _Activation(settings, tuple(devices), Report("torch_sdpa"), scoped)
    with _lock:
        if not scoped:
            _active[:] = [a for a in _active if a.scoped]
        _active.append(activation)
        _follow()
    return activation


def _current():
    """The activation in effect. Without one, the kernels were activated by PyTorch's registry."""
    try:
        return _active[-1]
    except IndexError:
        return _DEFAULT


_DEFAULT = _Activation(sdpa_call.Settings(), ("cpu", "cuda"), Report("torch_sdpa"), False)


# --- calls ----------------------------------------------------------------------------------------


def _sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False,
):  # fmt: skip
    """``aten::scaled_dot_product_attention`` while the hook is active."""
    activation = _current()
    attn_mask = masks.spelled_out(attn_mask, query.device)
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    kwargs = dict(scale=scale, enable_gqa=enable_gqa)
    original = lambda: _call_original("scaled_dot_product_attention", query, args, kwargs)
    if query.device.type not in activation.devices:
        return _other_device(activation, query.device.type, original)
    if not torch.backends.cuda.flash_sdp_enabled():
        return _elsewhere(activation, _EXCLUDED, original, deliberate=True)
    reason = sdpa_call.refusal(query, key, value, attn_mask, dropout_p)
    if reason is not None:
        return _elsewhere(activation, reason, original)
    if not _plain(query, key, value, attn_mask):
        return _routed(activation, *args[:4], is_causal, scale, enable_gqa)
    refuse_transforms()
    try:
        out, _ = sdpa_call.run(
            activation.settings, query, key, value, attn_mask, is_causal, scale, enable_gqa
        )
    except NotImplementedError as error:
        return _elsewhere(activation, str(error).removeprefix("sagebwd: "), original)
    activation.seen.ran()
    return out


def _plain(*tensors):
    """Whether a call is eager and of ordinary tensors, so that nothing records or replaces
    operators."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and all(type(t) in (torch.Tensor, torch.nn.Parameter, type(None)) for t in tensors)
    )


def _routed(activation, q, k, v, mask, is_causal, scale, enable_gqa):
    """A call that is traced, or of tensors that handle operators themselves (DTensor). It takes
    PyTorch's path down to the flash operator, whose kernel is ours."""
    name = "scaled_dot_product_attention"
    kwargs = dict(enable_gqa=enable_gqa)
    reason = _not_for_flash(q, k, v, mask, is_causal)
    if reason is None:
        *heads, heads_mask, lead = sdpa_call.as_heads(q, k, v, mask, enable_gqa)
        # PyTorch's operator gives a result of q's shape.
        *heads, heads_scale = padding.to_one_head_dim(*heads, scale)
        args = (*heads, heads_mask, 0.0, is_causal)
        _here.went_to_math = False
        out = _call_original(name, q, args, kwargs | {"scale": heads_scale}, passing=False)
        if not _here.went_to_math:
            wanted = (*lead, q.shape[-2], v.shape[-1])
            return out if out.shape == wanted else out[..., : v.shape[-1]].reshape(wanted)
        reason = (
            "PyTorch chose its math kernel, in compiled code or under a dispatch mode: call "
            "sagebwd.attention there"
        )
    args, kwargs = (q, k, v, mask, 0.0, is_causal), kwargs | {"scale": scale}
    return _elsewhere(activation, reason, lambda: _call_original(name, q, args, kwargs))


def _not_for_flash(q, k, v, mask, is_causal):
    """Why PyTorch would not give a call on CUDA to flash attention; else None."""
    if q.device.type != "cuda":
        return None
    what = None
    if mask is not None:
        what = "attn_mask"
    elif q.dtype == torch.float32:
        what = "float32"
    elif is_causal and q.shape[-2] != k.shape[-2]:
        what = "is_causal=True with unequal lengths"
    if what is None:
        return None
    return (
        f"{what} on CUDA is not supported in compiled code and under dispatch modes, where PyTorch "
        "keeps it from flash attention: use 16 bits without a mask, or torch.compiler.disable"
    )


def _math(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, *,
    scale=None, enable_gqa=False,
):  # fmt: skip
    """``aten::_scaled_dot_product_attention_math`` while the hook is active: PyTorch's kernel for
    calls that no other kernel takes."""
    args = (query, key, value, attn_mask, dropout_p, is_causal, dropout_mask)
    kwargs = dict(scale=scale, enable_gqa=enable_gqa)
    original = lambda: _call_original("_scaled_dot_product_attention_math", query, args, kwargs)
    if getattr(_here, "passing", None) is not None:  # _sdpa knows about this call
        _here.went_to_math = True
        return original()
    activation = _current()
    if query.device.type not in activation.devices:
        return _other_device(activation, query.device.type, original)
    reason = sdpa_call.refusal(query, key, value, attn_mask, dropout_p)
    if reason is not None and query.is_nested:
        return _elsewhere(activation, reason, original)
    reason = "PyTorch's math kernel was called by name: call F.scaled_dot_product_attention"
    return _elsewhere(activation, reason, original, deliberate=True)


def _batched(*args, **kwargs):
    """Both of them under torch.vmap."""
    raise NotImplementedError(
        "sagebwd: torch.vmap is not supported; attention is batched already, fold the mapped "
        "dimension into the batch dimension"
    )


# These two are replaced where Python looks them up. torch.compile notices that, and compiles again.
_original_sdpa = F.scaled_dot_product_attention
_original_mha = F.multi_head_attention_forward


_in_place = 0  # calls during which the original is back in its place


@functools.wraps(_original_sdpa)
def _scaled_dot_product_attention(*args, **kwargs):
    if torch.compiler.is_compiling() or not has_torch_function((*args, *kwargs.values())):
        return _original_sdpa(*args, **kwargs)
    # A mode or a class of tensors wants to see the call. It knows the function as it stands in F,
    # and as PyTorch made it: both must be the same. What the function calls is ours all the same.
    global _in_place
    with _lock:
        _in_place += 1
        _patch_sdpa()
    try:
        return _original_sdpa(*args, **kwargs)
    finally:
        with _lock:
            _in_place -= 1
            _patch_sdpa()


@functools.wraps(_original_mha)
def _multi_head_attention_forward(*args, **kwargs):
    need_weights = args[15] if len(args) > 15 else kwargs.get("need_weights", True)
    if need_weights:
        query = args[0] if args else kwargs["query"]
        _note_need_weights(query.device.type)
    return _original_mha(*args, **kwargs)


@torch.compiler.assume_constant_result  # runs while code is traced, too
def _note_need_weights(device):
    activation = _current()
    if device in activation.devices:
        _elsewhere(activation, _NEED_WEIGHTS, lambda: None)
    else:
        _other_device(activation, device, lambda: None)


def _elsewhere(activation, reason, original, *, deliberate=False):
    """original() for a call that cannot run here, if a fallback was asked for; else an error."""
    if not (activation.settings.fallback or deliberate):
        raise activation.seen.refuse(reason)
    activation.seen.pass_on(reason)
    return original()


def _other_device(activation, device, original):
    if device in ("cpu", "cuda", "meta"):  # a choice of the user, or no computation at all
        reason = f"device {device} is not among devices={activation.devices}"
        activation.seen.pass_on(reason, warn=False)
        return original()
    reason = f"device {device} is not supported: move the model to the CPU or to CUDA"
    return _elsewhere(activation, reason, original)


def _guarded(device, name, args, kwargs, reason, compute):
    """A flash operator: compute(), or the replaced kernel if the call cannot run here and a
    fallback was asked for. The backward decides by the same arguments as its forward, so both
    decide alike."""
    activation = _current()
    counts = not name.endswith("_backward")
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
    original = lambda: _originals[device][name].call_boxed(key, *args, **kwargs)
    if getattr(_here, "passing", False):
        return original()
    if reason is None:
        try:
            out = compute()
        except NotImplementedError as error:
            reason = str(error).removeprefix("sagebwd: ")
        else:
            if counts:
                activation.seen.ran()
            return out
    if counts or not activation.settings.fallback:
        return _elsewhere(activation, reason, original)
    return original()


# --- installation ---------------------------------------------------------------------------------

_kernels = Kernels(lambda: _current().settings, _guarded)
_originals = {}  # dispatch key -> operator -> the kernel it had before
_libraries = {}  # what is replaced now: "front" and "CPU"; CUDA's is with PyTorch's registry
_switches = {}  # PyTorch's switches as they were before

_FRONT = {"scaled_dot_product_attention": _sdpa, "_scaled_dot_product_attention_math": _math}


def _follow():
    """Installs what the current activation needs and removes the rest."""
    devices = _active[-1].devices if _active else ()
    _set("front", bool(_active), _install_front)
    _set("CPU", "cpu" in devices, lambda: _install("CPU", _kernels.cpu()))
    in_registry = torch.nn.attention.current_flash_attention_impl() == NAME
    if "cuda" in devices and not in_registry:
        register()
        torch.nn.attention.activate_flash_attention_impl(NAME)
    elif "cuda" not in devices and in_registry:
        torch.nn.attention.restore_flash_attention_impl()
    _switch("cudnn", "cuda" in devices, torch.backends.cuda.cudnn_sdp_enabled,
            torch.backends.cuda.enable_cudnn_sdp)  # fmt: skip
    _switch("fast path", bool(_active), torch.backends.mha.get_fastpath_enabled,
            torch.backends.mha.set_fastpath_enabled)  # fmt: skip
    _patch_sdpa()
    _patch("multi_head_attention_forward", _original_mha, _multi_head_attention_forward, _active)


def _patch_sdpa():
    wanted = _active and not _in_place
    _patch("scaled_dot_product_attention", _original_sdpa, _scaled_dot_product_attention, wanted)


def _patch(name, original, ours, wanted):
    """Replaces PyTorch's function by ours, or the reverse, unless somebody else has replaced it."""
    before, after = (original, ours) if wanted else (ours, original)
    if getattr(F, name) is before:
        setattr(F, name, after)


def _set(name, wanted, install):
    if wanted and name not in _libraries:
        _libraries[name] = install()
    elif not wanted:
        _libraries.pop(name, None)


def _switch(name, off, get, put):
    """Switches something of PyTorch off, or back to what it was."""
    if off and name not in _switches:
        _switches[name] = get()
        put(False)
    elif not off and name in _switches:
        put(_switches.pop(name))


def _install(device, kernels):
    # A fallback must not go through the operator, which would come back here: hold the kernels
    # themselves.
    _originals[device] = {
        name: torch.library.get_kernel(f"aten::{name}", device) for name in kernels if _exists(name)
    }
    library = Library("aten", "IMPL", device)
    for name, kernel in kernels.items():
        if _exists(name):
            _replace(library, name, kernel, device)
    return library


def _install_front():
    """Replaces the functions that PyTorch makes of other operators, for all devices at once."""
    # AutogradCPU stands for all keys: such functions have one kernel for all of them, and PyTorch
    # cannot be asked for the kernel of an alias key.
    _originals["front"] = {
        name: torch.library.get_kernel(f"aten::{name}", "AutogradCPU") for name in _FRONT
    }
    library = Library("aten", "IMPL")
    for name, function in _FRONT.items():
        _replace(library, name, function, "CompositeImplicitAutograd")
        _replace(library, name, _batched, "FuncTorchVmapMode")
    return library


def _replace(library, name, kernel, key):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced is the purpose
        library.impl(name, kernel, key, allow_override=True)


def _call_original(name, query, args, kwargs, passing=True):
    """A function of the front as PyTorch has it. ``passing``: so are the kernels below."""
    before, _here.passing = getattr(_here, "passing", None), passing
    try:
        return _originals["front"][name].call_boxed(torch._C._dispatch_keys(query), *args, **kwargs)
    finally:
        _here.passing = before


def _exists(name):
    return hasattr(torch.ops.aten, name)


class _Handle:
    """What the registry keeps; its ``remove`` puts the operators back."""

    def __init__(self, library):
        self.library = library

    def remove(self):
        self.library = None


def _install_cuda():
    return _Handle(_install("CUDA", _kernels.cuda()))
