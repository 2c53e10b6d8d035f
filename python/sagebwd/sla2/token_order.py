# SPDX-License-Identifier: Apache-2.0
"""Tokens of a video in boxes instead of rows, so that a block of tokens is a small piece of space
and time."""

import functools

import torch

#: Tokens as the model has them: a row of a frame after the other.
RASTER = (1, 1, 1)


@functools.lru_cache(maxsize=32)
def box_order(grid, box):
    """The places in raster order of the tokens of a (frames, height, width) grid, box after box,
    and in raster order inside of a box. Boxes at the far ends may be smaller."""
    places = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    number = torch.zeros(grid, dtype=torch.long)
    for place, size, side in zip(places, grid, box):
        number = number * -(-size // side) + place // side
    return number.flatten().argsort(stable=True)


class TokenOrder:
    """Reorders tokens and rotary angles at the door of a diffusers ``WanTransformer3DModel`` and
    turns them back before its output. Everything between works on tokens one by one, except for
    attention, whose result does not depend on their order."""

    def __init__(self, box, patch_size):
        self.box, self.patch_size = tuple(box), tuple(patch_size)
        self.order = None  # of the call that is under way

    def attach(self, model):
        # No hook is inside a block: activation checkpointing runs blocks again, perhaps after
        # another video went through the model.
        model.rope.register_forward_hook(self.angles)
        model.patch_embedding.register_forward_hook(self.tokens)
        model.condition_embedder.register_forward_hook(self.times)
        model.norm_out.register_forward_pre_hook(self.back)

    def angles(self, module, args, output):
        video = args[0]
        grid = tuple(n // p for n, p in zip(video.shape[2:], self.patch_size))
        self.order = box_order(grid, self.box).to(video.device)
        return tuple(t.index_select(1, self.order) for t in output)

    def tokens(self, module, args, output):
        return output.flatten(2).index_select(2, self.order).view_as(output)

    def times(self, module, args, output):
        projected = output[1]
        if projected.dim() == 3:  # one time for each token
            projected = projected.index_select(1, self.order)
        return (output[0], projected, *output[2:])

    def back(self, module, args):
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(inverse), device=inverse.device)
        return (args[0].index_select(1, inverse), *args[1:])
