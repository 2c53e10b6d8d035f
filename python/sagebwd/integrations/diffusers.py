# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for the models of Hugging Face diffusers.

    from sagebwd.integrations import diffusers as sage
    with sage.enabled() as seen:
        loss = train_step(transformer)
        loss.backward()
    print(seen)                           # how many calls ran here, which did not and why

    sage.register()                       # or for one model, by diffusers' own method:
    transformer.set_attention_backend("sagebwd")

Models of diffusers reach attention in two ways, and the hook covers both. Newer models use a table
of backends with a closed list of names; :func:`enable` replaces one of them, ``"native"`` by
default. Older models (DiT, SD3, UNets, PixArt, …) call ``F.scaled_dot_product_attention`` in their
attention processors; the hook replaces ``F`` in those modules of diffusers and nowhere else.
:func:`disable` undoes everything. docs/diffusers.md lists the families of models.

Masks may describe padding (of texts, also as additive -10000 or -inf), a causal mask, a window,
documents, or few sets of queries that see the same keys. Other masks, dropout, context parallelism
and processors that compute attention weights themselves raise a NotImplementedError that names the
remedy. With ``fallback=True`` such calls run diffusers' own attention, with one warning per reason.
Heads of more than 256 channels, as autoencoders have, are left to diffusers with a warning. A block
of :func:`enabled` that saw no call warns at its end.
"""

import contextlib
import functools
import inspect
import sys
import threading
import types
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._device import DeviceContext

from .. import masks
from . import sdpa_call
from .report import Report

_NO_CALL = (
    "The model may use another backend (model.set_attention_backend('native'), or "
    "enabled(name=...)), or attention that is not softmax attention, or none in this block"
)
_SCORES = (
    "this attention processor computes attention weights itself: use "
    "model.set_attn_processor(AttnProcessor2_0()), or the model's default one"
)
_POOLING = (
    "F.multi_head_attention_forward (pooling of texts) is PyTorch's own attention: add "
    "sagebwd.integrations.torch_sdpa.enabled() to run it here"
)
_WATCHED = (
    "{} watches PyTorch's functions and may replace attention (as diffusers does where it skips "
    "attention scores), so PyTorch's own runs there"
)
_ARGUMENTS = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    "return_lse", "_parallel_config",
)  # fmt: skip


class _Activation(NamedTuple):
    backend: object
    settings: sdpa_call.Settings
    seen: Report
    scoped: bool  # by enabled(), which ends it


_active = []  # the last one counts
_registered = {}  # backend -> activation of register()
_lock = threading.RLock()
_replaced = {}  # backend -> what the registry had
_modules = {}  # modules of diffusers whose F is replaced
_traced = False  # whether torch.compile saw a call; it does not run again in later blocks


# --- public ---------------------------------------------------------------------------------------


def enable(name="native", *, recipe="vectorwise", backward="int8", fallback=False):
    """Runs attention of diffusers here until :func:`disable`: calls of the backend ``name``, and of
    processors that cannot choose a backend. Returns the
    :class:`~sagebwd.integrations.report.Report` of what it sees. A second call replaces the
    settings."""
    return _push(False, name, recipe, backward, fallback).seen


def disable(name="native"):
    """Puts diffusers' own attention back. Does nothing when it is in place."""
    backend = _registry()[0](name)
    with _lock:
        _active[:] = [a for a in _active if a.backend != backend]
        _follow()


@contextlib.contextmanager
def enabled(name="native", *, recipe="vectorwise", backward="int8", fallback=False):
    """:func:`enable` for the time of a ``with`` block, which gets the Report."""
    activation = _push(True, name, recipe, backward, fallback)
    try:
        yield activation.seen
    finally:
        with _lock:
            late = [name for name, _ in _direct_callers()]
            _active[:] = [a for a in _active if a is not activation]
            _follow()
    if late:
        activation.seen.pass_on(
            f"{', '.join(late)} was imported inside the block: import the model's class before it"
        )
    elif not _traced:
        activation.seen.close(_NO_CALL)


def register(name="sagebwd", *, recipe="vectorwise", backward="int8", fallback=False):
    """Adds a backend to diffusers, so that ``model.set_attention_backend(name)`` and ``with
    attention_backend(name)`` run attention here. Returns the
    :class:`~sagebwd.integrations.report.Report` of what it sees. Models whose processors cannot
    choose a backend (SD3, UNets, PixArt, …) are refused by ``set_attention_backend``; for them
    there is :func:`enabled`. As with any backend, diffusers then takes the last one that was set
    for models that chose none."""
    from diffusers.models.modeling_utils import ModelMixin

    names, registry = _registry()
    if name in registry._backends and names(name) not in _registered:
        raise ValueError(
            f"register: diffusers has a backend {name!r} already; enable({name!r}) runs its calls "
            "here"
        )
    settings = sdpa_call.Settings.of(recipe, backward, fallback)
    with _lock:
        backend = names(name) if name in registry._backends else _new_member(names, name)
        native = names("native")
        kept = _replaced.get(native) or tuple(table[native] for table in _tables())
        _replaced[backend] = kept
        _fill(backend)
        _registered[backend] = _Activation(backend, settings, Report("diffusers"), False)
        if ModelMixin.set_attention_backend is not _set_attention_backend:
            _replaced["setter"] = ModelMixin.set_attention_backend
            ModelMixin.set_attention_backend = _set_attention_backend
    return _registered[backend].seen


def unregister(name="sagebwd"):
    """Removes a registered backend. Models that use it must be switched to another one first."""
    from diffusers.models.modeling_utils import ModelMixin

    names, registry = _registry()
    with _lock:
        backend = next((b for b in _registered if b.value == name), None)
        if backend is None:
            return
        del _registered[backend], _replaced[backend]
        for table in _tables():
            del table[backend]
        del names._member_map_[backend.name], names._value2member_map_[name]
        names._member_names_.remove(backend.name)
        if registry._active_backend == backend:
            registry.set_active_backend(names("native"))
        if not _registered:
            ModelMixin.set_attention_backend = _replaced.pop("setter")


def _new_member(names, name):
    """A further member of diffusers' enumeration of backends."""
    member = str.__new__(names, name)
    member._name_, member._value_ = f"REGISTERED_{name.upper()}", name
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    names._member_names_.append(member._name_)
    return member


def _set_attention_backend(self, backend):
    """``ModelMixin.set_attention_backend``, which passes over processors without a backend."""
    ours = any(known.value == backend.lower() for known in _registered)
    processors = (getattr(module, "processor", None) for module in self.modules())
    if ours and not any(hasattr(p, "_attention_backend") for p in processors):
        raise ValueError(
            f"sagebwd: the attention processors of {type(self).__name__} cannot choose a backend, "
            "and diffusers would leave them as they are: use "
            "sagebwd.integrations.diffusers.enabled()"
        )
    return _replaced["setter"](self, backend)


def _push(scoped, name, recipe, backward, fallback):
    settings = sdpa_call.Settings.of(recipe, backward, fallback)
    activation = _Activation(_registry()[0](name), settings, Report("diffusers"), scoped)
    if activation.backend in _registered:
        raise ValueError(f"enable: {name!r} is the backend of register(), which runs here already")
    with _lock:
        if not scoped:
            _active[:] = [a for a in _active if a.scoped or a.backend != activation.backend]
        _active.append(activation)
        _follow()
    return activation


# --- calls ----------------------------------------------------------------------------------------


def _attend(activation, original, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """(out, lse) of [b, h, s, d] tensors, or (original(), None)."""
    mode = _watching_mode()
    if mode is not None:
        _note(activation, _WATCHED.format(mode), deliberate=True)
        return original(), None
    attn_mask = masks.spelled_out(attn_mask, q.device)
    reason = sdpa_call.refusal(q, k, v, attn_mask, dropout_p)
    if reason is None:
        try:
            run = sdpa_call.run if attn_mask is None else _run_masked
            results = run(activation.settings, q, k, v, attn_mask, is_causal, scale, enable_gqa)
        except NotImplementedError as error:
            reason = str(error).removeprefix("sagebwd: ")
        else:
            _note(activation, None)
            return results
    _note(activation, reason, deliberate=q.shape[-1] > 256)
    return original(), None


def _watching_mode():
    """The name of a mode that may want to see or to replace F.scaled_dot_product_attention. (That
    of torch.set_default_device does not.)"""
    for i in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(i)
        if not isinstance(mode, DeviceContext):
            return type(mode).__name__
    return None


@torch.compiler.disable  # looks at the numbers of the mask
def _run_masked(*args):
    return sdpa_call.run(*args)


def _note(activation, reason, deliberate=False):
    """Counts a call that ran, or that is passed on for a reason; or raises."""
    if torch.compiler.is_compiling():
        _count_traced(_all().index(activation), reason, deliberate)
    else:
        _count(activation, reason, deliberate)


def _count(activation, reason, deliberate):
    if reason is None:
        activation.seen.ran()
    elif activation.settings.fallback or deliberate:
        activation.seen.pass_on(reason)
    else:
        raise activation.seen.refuse(reason)


@torch.compiler.assume_constant_result  # runs once, while code is traced
def _count_traced(index, reason, deliberate):
    global _traced
    _traced = True
    _count(_all()[index], reason, deliberate)


def _all():
    return [*_active, *_registered.values()]


def _backend_function(backend):
    """The function in diffusers' table: [b, s, h, d] tensors."""

    def sagebwd_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False, return_lse=False, _parallel_config=None,
    ):  # fmt: skip
        activation = [a for a in _all() if a.backend == backend][-1]
        given = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                     enable_gqa=enable_gqa, return_lse=return_lse,
                     _parallel_config=_parallel_config)  # fmt: skip
        function, _, names = _replaced[backend]
        original = lambda: function(query, key, value, **{k: given[k] for k in given if k in names})
        reason = _unsupported(query, key, enable_gqa, _parallel_config)
        if reason is not None:
            _note(activation, reason)
            return original()
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]  # as diffusers reads it
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out, lse = _attend(
            activation, original, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if lse is None:
            return out
        # diffusers keeps lse as [b, s, h].
        return (out.transpose(1, 2), lse.transpose(1, 2)) if return_lse else out.transpose(1, 2)

    return sagebwd_attention


def _unsupported(query, key, enable_gqa, parallel_config):
    if parallel_config is not None:
        return (
            "diffusers' context parallelism is not supported: use "
            "sagebwd.integrations.context_parallel"
        )
    if not enable_gqa and query.shape[2] != key.shape[2]:
        heads = f"{query.shape[2]} query heads and {key.shape[2]} key heads"
        return f"{heads} without enable_gqa are not supported: pass enable_gqa=True"
    return None


def _scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """``F.scaled_dot_product_attention`` of diffusers' modules."""
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    original = lambda: F.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)
    return _attend(_active[-1], original, *args, scale, enable_gqa)[0]


def _multi_head_attention_forward(*args, **kwargs):
    """``F.multi_head_attention_forward`` of diffusers' modules."""
    _note(_active[-1], _POOLING, deliberate=True)
    return F.multi_head_attention_forward(*args, **kwargs)


def _get_attention_scores(self, query, key, attention_mask=None):
    """``Attention.get_attention_scores``: for processors that compute the softmax themselves."""
    _note(_active[-1], _SCORES)
    return _replaced["scores"](self, query, key, attention_mask)


# --- installation ---------------------------------------------------------------------------------


def _registry():
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    return AttentionBackendName, _AttentionBackendRegistry


def _tables():
    registry = _registry()[1]
    return registry._backends, registry._constraints, registry._supported_arg_names


def _fill(backend):
    """Our entries in diffusers' tables. diffusers drops arguments that a backend does not name;
    this one names all of them, and refuses what it cannot do."""
    for table, entry in zip(_tables(), (_backend_function(backend), [], set(_ARGUMENTS))):
        table[backend] = entry


def _follow():
    """Replaces what the activations need and puts back the rest."""
    from diffusers.models.attention_processor import Attention

    wanted = {a.backend for a in _active}
    for backend in wanted - set(_replaced):
        _replaced[backend] = tuple(table[backend] for table in _tables())
        _fill(backend)
    for backend in set(_replaced) - wanted - set(_registered) - {"scores", "setter"}:
        for table, entry in zip(_tables(), _replaced.pop(backend)):
            table[backend] = entry
    if _active:
        if "scores" not in _replaced:
            _replaced["scores"] = Attention.get_attention_scores
            Attention.get_attention_scores = _get_attention_scores
        for name, module in _direct_callers():
            module.F = _modules[name] = _functional()
    else:
        if "scores" in _replaced:
            Attention.get_attention_scores = _replaced.pop("scores")
        for name in _modules:
            if name in sys.modules:
                sys.modules[name].F = F
        _modules.clear()


def _direct_callers():
    """Modules of diffusers' models that call F.scaled_dot_product_attention themselves and whose F
    is PyTorch's. Autoencoders with attention code of their own are left out."""
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and not name.startswith("diffusers.models.autoencoders"):
            if vars(module).get("F") is F and _calls_sdpa(name):
                yield name, module


@functools.cache
def _calls_sdpa(name):
    return "F.scaled_dot_product_attention(" in inspect.getsource(sys.modules[name])


@functools.cache
def _functional():
    """torch.nn.functional with our attention."""
    module = types.ModuleType(F.__name__, F.__doc__)
    vars(module).update(vars(F))
    module.scaled_dot_product_attention = _scaled_dot_product_attention
    module.multi_head_attention_forward = _multi_head_attention_forward
    return module
