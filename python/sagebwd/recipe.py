# SPDX-License-Identifier: Apache-2.0
"""Recipes: which values share an INT8 scale, and every switch that changes the numbers."""

from dataclasses import dataclass, replace

from . import arguments

#: The seven matmuls and their bits, in the order they run.
MATMULS = {"S": 1, "O": 2, "S'": 4, "dV": 8, "dP": 16, "dQ": 32, "dK": 64}

_SCHEMES = ("vectorwise", "paper")
#: The matmuls that ``rounding="dither"`` applies to unless it names some.
_DITHERABLE = ("O", "dV", "dQ", "dK")
# Field: from, to, in words. The library says which of these it can run.
_INTEGERS = {
    "tile_q": (0, 256, "0 or a multiple of 64 up to 256"),
    "tile_k": (0, 256, "0 or a multiple of 64 up to 256"),
    "seed": (0, 2**64 - 1, "an int from 0 to 2**64 - 1"),
}


def _dithered(rounding):
    """Names of the matmuls whose codes of P or dS are dithered."""
    word, _, names = rounding.partition(":") if isinstance(rounding, str) else ("", "", "")
    if rounding == "nearest":
        return ()
    if rounding == "dither":
        return _DITHERABLE
    names = names.split(",")
    if word != "dither" or not set(names) <= set(_DITHERABLE):
        raise ValueError(
            "recipe rounding: expected 'nearest', 'dither' or 'dither:' with names of "
            f"{_DITHERABLE}, such as 'dither:dQ', got {rounding!r}"
        )
    return tuple(dict.fromkeys(names))


def _rounding_text(rounding):
    """The form that the operators take, with bits in place of names."""
    names = _dithered(rounding)
    if set(names) in (set(), set(_DITHERABLE)):
        return "dither" if names else "nearest"
    return f"dither:{sum(MATMULS[name] for name in names)}"


@dataclass(frozen=True)
class Recipe:
    """A quantisation recipe. ``Recipe()`` is the default, ``Recipe.paper()`` the published method.

    scheme
        ``"vectorwise"``: one scale per token of Q, V and dO, per 128 keys of K, and per query or
        key of each tile of P and dS. ``"paper"``: one scale per block and per tile (arXiv
        2603.02170). Its gradient error grows with the batch.
    smooth_k, smooth_q, smooth_v
        Subtract a mean before quantising and correct for it exactly: only rounding changes.
    rotate
        Multiply Q and K with a fixed orthogonal matrix before quantising, which spreads outlier
        channels. Exact; the gradients are turned back.
    k_per_token
        One scale per token of K instead of one per 128 keys: for keys far longer than their
        neighbours, and for large logits.
    rounding, seed
        ``"dither"`` rounds P and dS without bias; the same seed gives the same bits (dq on a GPU:
        with ``deterministic=True``).
        ``"dither:dQ"`` does so for the operand of dQ alone (the one that the tuned GPU kernels
        have in ``"vectorwise"``); ``dither:dQ,dK`` for two of ``O dV dQ dK``.
    high_precision
        Names of matmuls to take out of INT8, of ``S O S' dV dP dQ dK``.
    tile_q, tile_k
        Tile sizes, multiples of 64 up to 256; 0: the backend's choice.
    save_codes
        Keep the INT8 codes of Q, K and V for the backward instead of Q, K and V: half the memory,
        and the same gradients bit for bit. Recipes whose codes do not suffice keep Q, K and V
        (``"paper"``, Q-smoothing, matmuls other than dV and dP out of INT8). So do calls on
        distributed tensors.
    """

    scheme: str = "vectorwise"
    tile_q: int = 0
    tile_k: int = 0
    smooth_k: bool = True
    smooth_q: bool = False
    smooth_v: bool = True
    rotate: bool = True
    k_per_token: bool = False
    rounding: str = "nearest"
    seed: int = 0
    high_precision: tuple = ()
    save_codes: bool = True

    def __post_init__(self):
        if self.scheme not in _SCHEMES:
            raise ValueError(f"recipe scheme: expected one of {_SCHEMES}, got {self.scheme!r}")
        _dithered(self.rounding)
        for key, (low, high, expected) in _INTEGERS.items():
            value = arguments.integer(f"recipe {key}", getattr(self, key), low, high, expected)
            if key.startswith("tile_") and value % 64:
                raise ValueError(f"recipe {key}: expected {expected}, got {value}")
            object.__setattr__(self, key, value)
        for key in ("smooth_k", "smooth_q", "smooth_v", "rotate", "k_per_token", "save_codes"):
            object.__setattr__(self, key, arguments.flag(f"recipe {key}", getattr(self, key)))
        if isinstance(self.high_precision, str) or not hasattr(self.high_precision, "__iter__"):
            raise ValueError(
                "recipe high_precision: expected a tuple of matmul names, got "
                f"{self.high_precision!r}"
            )
        object.__setattr__(self, "high_precision", tuple(self.high_precision))
        for name in self.high_precision:
            if name not in MATMULS:
                raise ValueError(
                    f"recipe high_precision: expected names of {tuple(MATMULS)}, got {name!r}"
                )

    def __setstate__(self, state):
        """Checks a pickle or a copy like arguments. One of an older version has fewer fields, or
        those that were removed since."""
        if not isinstance(state, dict):
            raise ValueError(f"recipe: expected a pickle of sagebwd.Recipe, got {state!r}")
        state = without_removed(state)
        if not state.keys() <= self.__dataclass_fields__.keys():
            raise ValueError(f"recipe: expected a pickle of sagebwd.Recipe, got {state!r}")
        for key, value in state.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    @staticmethod
    def paper(**changes):
        """The published method: tiles of 128 x 64, K-smoothing, all of P·V in INT8."""
        return replace(
            Recipe(scheme="paper", tile_q=128, tile_k=64, smooth_v=False, rotate=False),
            **changes,
        )

    @staticmethod
    def vectorwise(**changes):
        """The default: a gradient error that does not grow with the batch, and that attention sinks
        and outlier channels hardly raise."""
        return replace(Recipe(), **changes)

    def text(self, lifted=()):
        """The form that the operators take: the scheme, and the switches that differ from its
        preset. ``lifted`` names further matmuls to take out of INT8."""
        preset = _PAPER if self.scheme == "paper" else _VECTORWISE
        if self is preset and not lifted:
            return self.scheme  # most calls
        words = [self.scheme]
        for key in (
            "tile_q",
            "tile_k",
            "smooth_k",
            "smooth_q",
            "smooth_v",
            "rotate",
            "k_per_token",
        ):
            if getattr(self, key) != getattr(preset, key):
                words.append(f"{key}={int(getattr(self, key))}")
        if self.rounding != preset.rounding:
            words.append(f"rounding={_rounding_text(self.rounding)}")
        mask = 0
        for name in (*self.high_precision, *lifted):
            mask |= MATMULS[name]
        if mask:
            words.append(f"high_precision={mask}")
        return " ".join(words)


#: Fields of older versions: values that are what every recipe does now, and what to use instead.
_REMOVED = {
    "pv16_tiles": ((0,), "high_precision=('O',), or lead= of block lists"),
    "p_levels": ((0, 127), "the scheme and the backend say how many levels P has"),
}


def without_removed(fields):
    """The fields that an older version wrote of a recipe, without those that no longer exist.
    Raises if one of them would change numbers."""
    fields = dict(fields)
    for key, (same, instead) in _REMOVED.items():
        value = fields.pop(key, 0)
        paper_only = value == 127 and fields.get("scheme") != "paper"
        if value not in same or paper_only:
            raise ValueError(f"recipe: {key}={value} is no longer a switch ({instead})")
    return fields


_VECTORWISE = Recipe()
_PAPER = Recipe.paper()


def as_recipe(recipe):
    """A Recipe from itself or from its name."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe == "vectorwise":
        return _VECTORWISE
    if recipe == "paper":
        return _PAPER
    raise ValueError(f"recipe: expected a sagebwd.Recipe, 'vectorwise' or 'paper', got {recipe!r}")
