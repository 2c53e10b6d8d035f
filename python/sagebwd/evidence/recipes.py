# SPDX-License-Identifier: Apache-2.0
"""Recipes from the command line: ``vectorwise``, ``paper rotate=on``,
``mine=vectorwise lift=dQ,dK``."""

from ..recipe import Recipe
from ..train.errors import BadInput

BASES = ("paper", "vectorwise")


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
    """(name, Recipe) of ``[NAME=]RECIPE``; the name is the recipe's text if none is given."""
    first, *switches = text.split() or [""]
    name, separator, scheme = first.rpartition("=")
    if separator and not name:
        raise BadInput(f"recipe {text!r}: expected a name before '='")
    if ":" in first:
        raise BadInput(f"recipe {text!r}: switches are words, as in 'paper rotate=on lift=dQ,dK'")
    try:
        recipe = Recipe.parse(" ".join([scheme, *switches]))
    except ValueError as error:
        raise BadInput(f"recipe {text!r}: {error}") from None
    return name or recipe.text(), recipe
