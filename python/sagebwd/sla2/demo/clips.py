# SPDX-License-Identifier: Apache-2.0
"""Clips for image-to-video: textured discs bounce over a textured ground. The first frames are
given; what is behind and on the discs can be found there and nowhere else."""

import torch
from torch.nn.functional import interpolate


def _random(generator, *shape):
    return torch.rand(*shape, generator=generator, device=generator.device)


def _texture(count, size, cells, generator):
    """[count, 3, size, size]: random colours from -1 to 1, blurred over a cell."""
    colours = _random(generator, count, 3, cells, cells) * 2 - 1
    return interpolate(colours, size=(size, size), mode="bilinear", align_corners=False)


def clips(count, frames, size, generator, discs=2, cells=0):
    """[count, 3, frames, size, size] with values from -1 to 1, on the device of the generator.
    ``cells``: colours along a side of a texture; 0: one for every four pixels, which looks like
    noise to people."""
    cells, device = cells or size // 4, generator.device
    video = _texture(count, size, cells, generator)[:, :, None].repeat(1, 1, frames, 1, 1)
    place = torch.arange(size, device=device)
    time = torch.arange(frames, device=device)
    each = torch.arange(count, device=device)[:, None, None, None]
    for _ in range(discs):
        skin = _texture(count, size, cells, generator).permute(0, 2, 3, 1)
        radius = size * (0.12 + 0.08 * _random(generator, count, 1, 1))
        start, speed = _random(generator, 2, count, 2, 1)
        # A triangle wave goes from wall to wall.
        path = (start * 2 + (speed - 0.5) * time * (8 / frames)) % 2
        centre = radius + (1 - (path - 1).abs()) * (size - 2 * radius)  # [count, 2, frames]
        y, x = (place - centre[:, axis].round().long()[..., None] for axis in (0, 1))
        inside = y[..., :, None] ** 2 + x[..., None, :] ** 2 < radius[..., None] ** 2
        moved = skin[each, (y % size)[..., :, None], (x % size)[..., None, :]]
        video = torch.where(inside[:, None], moved.permute(0, 4, 1, 2, 3), video)
    return video
