# SPDX-License-Identifier: Apache-2.0
# Written by tools/declare.py from src/spec/recipe_fields.h.
"""The fields of recipes: names, defaults, limits, and what they mean."""

from dataclasses import dataclass

#: The seven matmuls and their bits, in the order they run.
MATMULS = {"S": 1, "O": 2, "S'": 4, "dV": 8, "dP": 16, "dQ": 32, "dK": 64}
#: The matmuls that dither can apply to.
DITHERABLE = ("O", "dV", "dQ", "dK")
#: Integers: the largest value, what it is a multiple of, and both in words.
INTEGERS = {
    "tile_q": (256, 64, "0 or a multiple of 64 up to 256"),
    "tile_k": (256, 64, "0 or a multiple of 64 up to 256"),
    "seed": (18446744073709551615, 1, "a number from 0 to 2^64 - 1"),
}
FLAGS = ("smooth_k", "smooth_q", "rotate")
#: Switches that stand in a recipe's text under their own names.
ALONE = ("smooth_k", "smooth_q", "rotate")
#: By scheme, the default first: what its preset has other than ``vectorwise``.
PRESETS = {
    "vectorwise": {},
    "paper": {"scheme": "paper", "tile_q": 128, "tile_k": 64, "rotate": False},
}


@dataclass(frozen=True)
class RecipeFields:
    """What a recipe is made of.

    scheme
        Which values share a scale. ``vectorwise`` has one per token of Q, K, V and dO, and per
        query or key of each tile of P and dS; under a causal mask no later token changes a bit of
        an earlier output. ``paper`` has one per block of tokens and one per tile of P and dS, as
        published: later tokens change the rounding of earlier rows, and the gradient error grows
        with the batch.
    tile_q
        Queries of a tile; 0: the backend's choice.
    tile_k
        Keys of a tile, in ``vectorwise`` up to 128; 0: the backend's choice.
    smooth_k
        Subtract a mean key before K is quantised. ``vectorwise`` takes means of earlier keys, one
        for each octave of blocks, and adds their logits again, exactly; it does the same with V,
        and adds the means to O again. ``paper`` takes the mean of the whole sequence: all logits
        of a row shift alike, so P does not change, and LSE is still that of the true logits.
    smooth_q
        In ``paper`` alone, because a block holds later queries: subtract the mean query of each
        block. The bias row c·μ_Q·Kᵀ is added to S, and (Σᵢ dSᵢⱼ)·μ_Q to dK.
    rotate
        Multiply Q and K by a fixed orthogonal matrix before they are quantised, which spreads
        outlier channels; the gradients are turned back.
    rounding
        ``dither`` rounds P and dS without bias, and replayably. ``dither:dQ`` does so for the
        operand of dQ alone, ``dither:O,dQ`` for those of two of O, dV, dQ, dK.
    seed
        Of the dither; the same seed gives the same bits (dQ on a GPU: in deterministic mode).
    high_precision
        Matmuls to lift out of INT8, of S, O, S', dV, dP, dQ, dK.
    """

    scheme: str = "vectorwise"
    tile_q: int = 0
    tile_k: int = 0
    smooth_k: bool = True
    smooth_q: bool = False
    rotate: bool = True
    rounding: str = "nearest"
    seed: int = 0
    high_precision: tuple = ()
