# SPDX-License-Identifier: Apache-2.0
"""Clips for image-to-video: textured discs bounce over a textured ground. The first frames are
given; what is behind and on the discs can be found there and nowhere else."""

import torch
from torch.nn.functional import interpolate


def _texture(count, size, cells, generator):
    """[count, 3, size, size]: random colours from -1 to 1, blurred over a cell."""
    colours = torch.rand(count, 3, cells, cells, generator=generator) * 2 - 1
    return interpolate(colours, size=(size, size), mode="bilinear", align_corners=False)


def clips(count, frames, size, generator, discs=2):
    """[count, 3, frames, size, size] with values from -1 to 1, on the CPU."""
    cells = size // 4
    video = _texture(count, size, cells, generator)[:, :, None].repeat(1, 1, frames, 1, 1)
    place = torch.arange(size, dtype=torch.float32)
    time = torch.arange(frames, dtype=torch.float32)
    for _ in range(discs):
        skin = _texture(count, size, cells, generator)
        radius = size * (0.12 + 0.08 * torch.rand(count, 1, generator=generator))
        start, speed = torch.rand(2, count, 2, 1, generator=generator)
        # A triangle wave goes from wall to wall.
        path = (start * 2 + (speed - 0.5) * time * (8 / frames)) % 2
        centre = radius[..., None] + (1 - (path - 1).abs()) * (size - 2 * radius[..., None])
        y, x = (place - centre[:, axis, :, None] for axis in (0, 1))  # [count, frames, size]
        inside = y[..., :, None] ** 2 + x[..., None, :] ** 2 < radius[..., None, None] ** 2
        for i in range(count):
            for f in range(frames):
                shift = centre[i, :, f].round().int().tolist()
                moved = skin[i].roll(shift, (1, 2))
                video[i, :, f] = torch.where(inside[i, f], moved, video[i, :, f])
    return video
