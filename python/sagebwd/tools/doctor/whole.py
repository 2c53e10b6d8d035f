# SPDX-License-Identifier: Apache-2.0
"""The hook itself, switched on in the whole model: which calls it serves, and what becomes of the
loss and of the gradients of all weights."""

import contextlib
import warnings
from dataclasses import dataclass

import torch

from ...integrations import diffusers, torch_sdpa, transformers

_NAME = "sagebwd-doctor"
_REGISTER = 'sagebwd.integrations.transformers.register(), then attn_implementation="sagebwd"'


@dataclass
class Whole:
    """A training step with the hook beside one without it."""

    switch: str  # what switches the hook on
    calls: int  # that ran in INT8
    elsewhere: dict  # {reason: calls}
    loss: float  # without the hook
    loss_int8: float
    error: float  # of the gradients of all weights together, relative L2
    worst: tuple  # (name, error) of the matrix whose gradient is furthest off


def compare(subject, recipe):
    """The Whole of a Subject."""
    loss, want = _gradients(subject)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what falls back is told below
        with _hooked(subject, recipe) as (switch, count):
            loss_int8, got = _gradients(subject)
            calls, elsewhere = count()
    squares = {
        name: ((got[name].double() - g.double()).square().sum().item(), _square(g))
        for name, g in want.items()
    }
    error, norm = (sum(pair[i] for pair in squares.values()) for i in (0, 1))
    matrices = {
        name: (e / n) ** 0.5
        for name, (e, n) in squares.items()
        if want[name].dim() > 1 and n > 1e-12 * norm
    }
    worst = max(matrices.items(), key=lambda item: item[1], default=("", 0.0))
    return Whole(switch, calls, elsewhere, loss, loss_int8, (error / norm) ** 0.5, worst)


def _square(tensor):
    return tensor.double().square().sum().item()


def _gradients(subject):
    """The loss, and {name: gradient} of all weights that have one."""
    with torch.enable_grad():
        loss = subject.loss(subject.model(**subject.batch))
        loss.backward()
    found = {n: p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    subject.model.zero_grad(set_to_none=True)
    return loss.item(), found


@contextlib.contextmanager
def _hooked(subject, recipe):
    """The hook for a model: (what a user writes, a function that counts calls)."""
    if subject.library == "diffusers":
        with diffusers.enabled(recipe=recipe, fallback=True) as seen:
            yield "with sagebwd.integrations.diffusers.enabled(): …", lambda: _counts(seen)
    elif not subject.model.is_backend_compatible():
        with torch_sdpa.enabled(recipe=recipe, fallback=True) as seen:
            yield "with sagebwd.integrations.torch_sdpa.enabled(): …", lambda: _counts(seen)
    else:
        with _registered(subject.model, recipe) as count:
            yield _REGISTER, count


def _counts(seen):
    return seen.calls, dict(seen.passed_on)


@contextlib.contextmanager
def _registered(model, recipe):
    """The hook for transformers, in this model for the time of a block."""
    from transformers import AttentionInterface

    calls = 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return ours(*args, **kwargs)

    transformers.register(_NAME, recipe=recipe, fallback="sdpa")
    ours = AttentionInterface()[_NAME]
    AttentionInterface.register(_NAME, counted)
    before = model.config._attn_implementation

    def count():
        elsewhere = transformers.fallback_calls(_NAME)
        return calls - sum(elsewhere.values()), elsewhere

    try:
        model.set_attn_implementation(_NAME)
        yield count
    finally:
        model.set_attn_implementation(before)
        transformers.unregister(_NAME)
