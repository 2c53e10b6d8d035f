# SPDX-License-Identifier: Apache-2.0
"""Recipes: which values share an INT8 scale, and every switch that changes the numbers."""

from dataclasses import dataclass

from . import arguments
from .recipe_fields import ALONE, DITHERABLE, FLAGS, INTEGERS, MATMULS, PRESETS, RecipeFields
from .suggest import did_you_mean

#: The names of recipes, the default first.
SCHEMES = tuple(PRESETS)
_EXPECTED = "vectorwise or paper, and switches such as smooth_k=off"
_FLAG = {"on": True, "off": False}
#: What the words of a recipe's text may say, as name=value.
SWITCHES = ("tile", *ALONE, "rounding", "lift")


def _dithered(rounding):
    """Names of the matmuls whose codes of P or dS are dithered."""
    word, _, names = rounding.partition(":") if isinstance(rounding, str) else ("", "", "")
    if rounding == "nearest":
        return ()
    if rounding == "dither":
        return DITHERABLE
    names = names.split(",")
    if word != "dither" or not set(names) <= set(DITHERABLE):
        near = did_you_mean(word, ("nearest", "dither"))
        raise ValueError(
            "recipe rounding: expected 'nearest', 'dither' or 'dither:' with names of "
            f"{DITHERABLE}, such as 'dither:dQ', got {rounding!r}{near}"
        )
    return tuple(dict.fromkeys(names))


def _in_order(names):
    return ",".join(name for name in MATMULS if name in names)


def _rounding_text(rounding):
    names = _dithered(rounding)
    if set(names) in (set(), set(DITHERABLE)):
        return "dither" if names else "nearest"
    return f"dither:{_in_order(names)}"


@dataclass(frozen=True)
class Recipe(RecipeFields):
    """A quantisation recipe. ``Recipe()`` is the default, in which later tokens change no bit of
    earlier outputs, ``Recipe.paper()`` the published method (arXiv 2603.02170), and
    ``Recipe.parse("vectorwise smooth_k=off")`` one from its text. :class:`RecipeFields` explains
    the switches that change the numbers.

    save_codes
        Keep the INT8 codes of Q, K and V for the backward instead of Q, K and V: half the memory,
        and the same gradients bit for bit. Recipes whose codes do not suffice keep Q, K and V
        (``"paper"``, matmuls other than dV and dP out of INT8). So do calls on distributed
        tensors.
    """

    save_codes: bool = True

    def __post_init__(self):
        if self.scheme not in SCHEMES:
            raise ValueError(
                "recipe scheme: expected 'vectorwise', which is causal bit for bit, or 'paper', "
                f"got {self.scheme!r}{did_you_mean(self.scheme, SCHEMES)}"
            )
        _dithered(self.rounding)
        for key, (most, step, expected) in INTEGERS.items():
            value = arguments.integer(f"recipe {key}", getattr(self, key), 0, most, expected)
            if value % step:
                raise ValueError(f"recipe {key}: expected {expected}, got {value}")
            object.__setattr__(self, key, value)
        for key in (*FLAGS, "save_codes"):
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
                    f"{did_you_mean(name, MATMULS)}"
                )
        if self.scheme == "vectorwise":
            self._check_vectorwise()

    def _check_vectorwise(self):
        """What it promises leaves no room for some values."""
        if self.smooth_q:
            raise ValueError(
                "recipe smooth_q: expected False in recipe vectorwise, because the mean of the "
                "queries of a block sees later tokens; got True. Recipe paper has this switch"
            )
        if self.tile_k not in (0, 64, 128):
            raise ValueError(
                "recipe tile_k: expected 0, 64 or 128 in recipe vectorwise, because the keys of a "
                f"tile share a centre; got {self.tile_k}. 0 lets the backend choose"
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
        return Recipe(**{**PRESETS["paper"], **changes})

    @staticmethod
    def vectorwise(**changes):
        """The default: under a causal mask later tokens change no bit of an earlier output, and the
        gradient error does not grow with the batch."""
        return Recipe(**changes)

    @staticmethod
    def parse(text, **changes):
        """A recipe of its name and the switches that differ from it, as in case strings:
        ``"vectorwise smooth_k=off rounding=dither:dQ lift=dQ,dK tile=64x128"``. ``changes`` are
        fields that no text has: ``seed`` and ``save_codes``."""
        words = text.split()
        scheme = [word for word in words if "=" not in word]
        if not words or len(scheme) > 1 or not set(scheme) <= set(SCHEMES):
            wrong = next((word for word in scheme if word not in SCHEMES), text)
            raise ValueError(
                f"recipe: expected {_EXPECTED}, got {wrong!r}{did_you_mean(wrong, SCHEMES)}"
            )
        fields = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                continue
            new = _fields_of(word, name, value)
            if new.keys() & fields.keys():
                raise ValueError(f"recipe {word!r}: {name} is given twice")
            fields.update(new)
        preset = PRESETS[scheme[0]] if scheme else {}
        return Recipe(**{**preset, **fields}, **changes)

    def text(self, lifted=()):
        """The shortest text that :meth:`parse` reads as this recipe, and that the operators take.
        ``lifted`` names further matmuls to take out of INT8."""
        preset = _PRESETS[self.scheme]
        if self is preset and not lifted:
            return self.scheme  # most calls
        words = [self.scheme]
        if (self.tile_q, self.tile_k) != (preset.tile_q, preset.tile_k):
            words.append(f"tile={self.tile_q}x{self.tile_k}")
        for key in ALONE:
            value = getattr(self, key)
            if value != getattr(preset, key):
                words.append(f"{key}={('off', 'on')[value] if key in FLAGS else value}")
        rounding = _rounding_text(self.rounding)
        if rounding != "nearest":
            words.append(f"rounding={rounding}")
        if self.high_precision or lifted:
            words.append(f"lift={_in_order((*self.high_precision, *lifted))}")
        return " ".join(words)


def _fields_of(word, name, value):
    """What a word of a text says: name=value."""
    if name == "tile":
        return dict(zip(("tile_q", "tile_k"), _numbers(word, value.split("x"), 2)))
    if name == "rounding":
        return {"rounding": value}
    if name == "lift":
        return {"high_precision": tuple(value.replace("S2", "S'").split(","))}
    if name in _REMOVED:
        raise ValueError(f"recipe: {word} is no longer a switch ({_REMOVED[name][-1]})")
    if name not in ALONE:
        near = did_you_mean(name, SWITCHES)
        raise ValueError(f"recipe: expected {_EXPECTED}, got {word!r}{near}")
    if name in FLAGS:
        if value not in _FLAG:
            raise ValueError(f"recipe {word!r}: expected on or off, got {value!r}")
        return {name: _FLAG[value]}
    return {name: _numbers(word, [value], 1)[0]}


def _numbers(word, values, count):
    if len(values) != count or not all(value.isdecimal() for value in values):
        expected = "tile=<queries>x<keys>" if count == 2 else "a whole number"
        raise ValueError(f"recipe {word!r}: expected {expected}")
    return [int(value) for value in values]


#: Fields of older versions: what their `vectorwise` and `paper` had, and what to use instead.
_REMOVED = {
    "pv16_tiles": ((0,), (0,), "high_precision=('O',), or lead= of block lists"),
    "p_levels": ((0,), (0, 127), "the scheme and the backend say how many levels P has"),
    "k_per_token": ((False,), (False,), "recipe vectorwise has a scale for each token of K"),
    "smooth_v": ((True,), (False,), "leave it out: in vectorwise smooth_k smooths V, too"),
}


def without_removed(fields):
    """The fields that an older version wrote of a recipe, without those that no longer exist.
    Raises if one of them was set."""
    fields = dict(fields)
    for key, (vectorwise, paper, instead) in _REMOVED.items():
        usual = paper if fields.get("scheme") == "paper" else vectorwise
        value = fields.pop(key, usual[0])
        if value not in usual and fields.get("scheme", "vectorwise") in SCHEMES:
            raise ValueError(f"recipe: {key}={value} is no longer a switch ({instead})")
    return fields


_PRESETS = {scheme: Recipe(**fields) for scheme, fields in PRESETS.items()}


def as_recipe(recipe):
    """A Recipe from itself or from its text."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return _PRESETS.get(recipe) or Recipe.parse(recipe)
    raise ValueError(
        f"recipe: expected a sagebwd.Recipe, or a text such as 'vectorwise' or 'paper "
        f"rotate=on', got {recipe!r}"
    )
