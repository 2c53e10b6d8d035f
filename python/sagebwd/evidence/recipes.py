# SPDX-License-Identifier: Apache-2.0
"""Recipes from the command line: ``vectorwise``, ``paper:rounding=dither,seed=3``,
``mine=vectorwise:high_precision=dQ+dK``. Options are those of ``sagebwd.Recipe``, whatever it has:
nothing here knows their names."""

import dataclasses

from ..recipe import Recipe
from ..suggest import did_you_mean
from ..train.errors import BadInput

BASES = {"paper": Recipe.paper, "vectorwise": Recipe.vectorwise}
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def parse_recipes(texts, taken=()):
    """{name: Recipe} of all texts. ``taken``: names that stand for something else."""
    recipes = {}
    for text in texts:
        name, recipe = parse_recipe(text)
        if name in recipes or name in taken:
            raise BadInput(f"recipe: two arms are named {name!r}; give one as NAME={text}")
        recipes[name] = recipe
    return recipes


def parse_recipe(text):
    """(name, Recipe) of ``[NAME=]BASE[:OPTION=VALUE,...]``; the name is the text if none is
    given."""
    head, _, options = text.partition(":")
    name, separator, base = head.rpartition("=")
    if base not in BASES:
        raise BadInput(
            f"recipe {text!r}: expected one of {', '.join(BASES)}, got {base!r}"
            f"{did_you_mean(base, BASES)}"
        )
    if separator and not name:
        raise BadInput(f"recipe {text!r}: expected a name before '='")
    changes = dict(_option(text, part) for part in options.split(",") if part)
    try:
        return name or text, BASES[base](**changes)
    except (TypeError, ValueError) as error:
        raise BadInput(f"recipe {text!r}: {error}") from None


def _option(text, part):
    key, separator, value = part.partition("=")
    defaults = {f.name: f.default for f in dataclasses.fields(Recipe)}
    if not separator or key not in defaults:
        raise BadInput(
            f"recipe {text!r}: expected OPTION=VALUE with an option of {', '.join(defaults)}, got "
            f"{part!r}{did_you_mean(key, defaults)}"
        )
    return key, _value(text, part, value, defaults[key])


def _value(text, part, value, default):
    """The value as what the option's default is."""
    if isinstance(default, bool):
        if value.lower() not in _FLAGS:
            raise BadInput(f"recipe {text!r}: expected on or off, got {part!r}")
        return _FLAGS[value.lower()]
    if isinstance(default, int):
        try:
            return int(value)
        except ValueError:
            raise BadInput(f"recipe {text!r}: expected a whole number, got {part!r}") from None
    # Commas separate options: high_precision=dQ+dK, rounding=dither:dQ+dK.
    if isinstance(default, tuple):
        return tuple(filter(None, value.split("+")))
    return value.replace("+", ",")
