# SPDX-License-Identifier: Apache-2.0
"""Attention of transformers itself, for the layers that sagebwd does not serve
(``register(fallback=...)`` in transformers.py)."""

import inspect
import re
import warnings
import weakref

import torch

from .transformers_masks import Pattern, Unsupported, describe

NAMES = ("sdpa", "eager")

# Keywords that change attention. An implementation obeys them only if it knows them; others pass
# over them without a word.
_CHANGING = frozenset(
    "softcap s_aux output_attentions position_bias attn_bias head_mask indices block_indices "
    "cache".split()
)


class Call:
    """A call of attention that sagebwd refuses, with the implementation that serves it.

    The model's eager attention says what a layer computes. ``sdpa`` serves the calls in which it
    obeys every keyword that the eager one obeys.
    """

    def __init__(self, name, module, query, key, value, kwargs, unknown):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.module, self.tensors, self.kwargs = module, (query, key, value), kwargs
        eager, sdpa = _eager(module), ALL_ATTENTION_FUNCTIONS["sdpa"]
        given = [k for k, x in kwargs.items() if x is not None and x is not False]
        changing = [k for k in given if k in _CHANGING]
        # A keyword that the eager attention has no name for concerns something else.
        changing += [k for k in given if k in unknown and eager is not None and _names(eager, k)]
        if name == "sdpa" and _has_sdpa(module) and all(_names(sdpa, k) for k in changing):
            self.name, self.function = "sdpa", sdpa
        elif eager is not None and all(_names(eager, k) or _reads(eager, k) for k in changing):
            self.name, self.function = "eager", eager
        else:
            changing = ["the call"] if eager is None else changing
            self._refuse(f"{', '.join(changing)} of {type(module).__name__}")
        if kwargs.get("cache") is not None:
            self._refuse("a paged cache (continuous batching)")

    def run(self, mask):
        """What the implementation returns, with its own kind of mask."""
        query, key, _ = self.tensors
        kwargs = self.kwargs
        if not isinstance(mask, Pattern):
            mask = self._drawn(mask, query)
        elif mask.source is not None:
            mask = mask.source.tensor(self.name, query.device)
        else:
            # The model gives no mask: sdpa would align the first query with the first key, and
            # eager would hide nothing.
            whole = mask.window == (-1, -1)
            aligned = query.shape[2] == key.shape[2] and self.name == "sdpa"
            if self.name == "sdpa":
                kwargs = dict(kwargs, is_causal=mask.causal)
            if whole and (aligned or not mask.causal):
                mask = None
            else:
                mask = _dense(mask, query)
                mask = mask if self.name == "sdpa" else _added(mask, query.dtype)
        if mask is not None and mask.shape[-1] not in (1, key.shape[2]):
            self._refuse(f"a mask of {mask.shape[-1]} keys beside {key.shape[2]} in the call")
        return self.function(self.module, *self.tensors, mask, **kwargs)

    def _drawn(self, mask, query):
        """A mask tensor of the model or of the caller."""
        shown = isinstance(mask, torch.Tensor) and mask.dim() == 4
        if not shown or not (mask.dtype == torch.bool or mask.is_floating_point()):
            self._refuse(f"a mask of another kind ({describe(mask)})")
        if mask.dtype == torch.bool and self.name == "eager":
            return _added(mask, query.dtype)  # eager adds what it is given
        return mask

    def _refuse(self, what):
        raise Unsupported(
            f"{what} is not supported, nor by PyTorch's attention in transformers",
            "use attn_implementation='eager' for this model",
            elsewhere=False,
        )


def _eager(module):
    """The eager attention of the file that a module's class comes from."""
    return inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")


def _names(function, keyword):
    code = inspect.unwrap(function).__code__
    return keyword in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _reads(eager, keyword):
    """What eager attention does without being told: it returns the weights, and takes the sinks
    from the module."""
    return keyword == "output_attentions" or (
        keyword == "s_aux" and "sinks" in inspect.unwrap(eager).__code__.co_names
    )


def _has_sdpa(module):
    """Whether the models that have such a module say that sdpa serves them."""
    from transformers import PreTrainedModel

    names = inspect.unwrap(type(module).forward).__globals__.values()
    models = [c for c in names if isinstance(c, type) and issubclass(c, PreTrainedModel)]
    models = [c for c in models if c is not PreTrainedModel]
    own = [c for c in models if c.config_class is type(getattr(module, "config", None))]
    return all(c._supports_sdpa for c in own or models)


def _dense(pattern, query):
    """bool [1, 1, s, kv] of a causal mask or a window; the last query sits at the last key."""
    s, kv = pattern.shape[2:]
    left, right = pattern.window
    right = 0 if pattern.causal else right
    ahead = torch.arange(kv, device=query.device) - torch.arange(kv - s, kv)[:, None].to(
        query.device
    )
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    return seen[None, None]


def _added(seen, dtype):
    """The mask that eager attention adds to the logits."""
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, zero, torch.finfo(dtype).min)


class Notes:
    """Which layers fell back, and why. A reason is said once."""

    def __init__(self):
        self._layers = {}  # (reason without its numbers): (reason, implementation, {layer: None})
        self.calls = {}  # reason: how many calls, those of compiled code when they are traced

    def add(self, reason, name, module, mask):
        layer = getattr(module, "_sagebwd_layer", getattr(module, "layer_idx", None))
        label = type(module).__name__ if layer is None else f"{layer} ({type(module).__name__})"
        if torch.compiler.is_compiling():
            _add_while_tracing(self, reason, name, label)
        elif (key := self._add(reason, name, label)) is not None:
            # All layers share the pattern of a mask, which ends when the last of them has run.
            shared = isinstance(mask, Pattern) and mask.source is not None
            weakref.finalize(mask, self._say, key) if shared else self._say(key)

    def _add(self, reason, name, label):
        """The key of a reason that is new; None if it is known."""
        key = re.sub(r"\d+", "#", reason), name
        new = key not in self._layers
        first, _, layers = self._layers.setdefault(key, (reason, name, {}))
        layers[label] = None
        self.calls[first] = self.calls.get(first, 0) + 1
        return key if new else None

    def _say(self, key):
        reason, name, layers = self._layers[key]
        warnings.warn(
            f"sagebwd: {reason}; these layers run on the {name!r} attention of transformers "
            f"instead: {', '.join(layers)}. sagebwd.integrations.transformers.fallbacks() lists "
            "all that do so later",
            stacklevel=2,
        )

    def layers(self):
        return {reason: list(layers) for reason, _, layers in self._layers.values()}


@torch.compiler.assume_constant_result
def _add_while_tracing(notes, reason, name, label):
    if (key := notes._add(reason, name, label)) is not None:
        notes._say(key)
