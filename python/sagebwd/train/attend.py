# SPDX-License-Identifier: Apache-2.0
"""Causal attention of a layer, chosen by the configuration. Full precision and INT8 differ only in
this file."""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..attention import attention

_MASK = (1 << 63) - 1


class Clock:
    """How far training has come. Dithered rounding draws its seeds from it. One per model."""

    def __init__(self):
        self.step = 0
        self.micro = 0


def dither_seed(seed, step, micro, layer):
    """One well-spread number per (run, step, micro-batch, layer): a linear combination, then the
    mixing of SplitMix64."""
    x = ((seed * 0x9E3779B97F4A7C15) ^ (step << 24) ^ (micro << 10) ^ layer) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) & _MASK


def make_attend(config, layer, clock):
    """A function of q [b, s, h, d] and k, v [b, s, hk, d]."""
    if config.context_parallel > 1:
        # PyTorch's context parallel replaces F.scaled_dot_product_attention, and runs its ring
        # steps in INT8 if the loop has asked for that.
        return _ring
    if config.attention == "fpa":
        return _sdpa
    if config.attention == "exact":
        return _exact
    recipe = config.make_recipe()
    if recipe.rounding != "nearest":
        return _Dithered(recipe, config.seed, layer, clock)
    return _int8(recipe)


@functools.cache
def _int8(recipe):
    # One function per recipe, not per layer: torch.compile then compiles one block for all.
    return lambda q, k, v: attention(q, k, v, causal=True, recipe=recipe)


def _sdpa(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(
        1, 2
    )


def _ring(q, k, v):
    group = q.shape[2] // k.shape[2]  # the ring knows no grouped queries
    return _sdpa(q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))


def _exact(q, k, v):
    with torch.autocast(q.device.type, enabled=False):
        return _sdpa(q.float(), k.float(), v.float()).to(q.dtype)


class _Dithered:
    def __init__(self, recipe, seed, layer, clock):
        self.recipe, self.seed, self.layer, self.clock = recipe, seed, layer, clock

    @torch.compiler.disable  # the seed is arithmetic on whole numbers, new in every call
    def __call__(self, q, k, v):
        clock = self.clock
        seed = dither_seed(self.seed, clock.step, clock.micro, self.layer)
        recipe = replace(self.recipe, seed=seed)
        return attention(q, k, v, causal=True, recipe=recipe)
