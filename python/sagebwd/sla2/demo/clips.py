# SPDX-License-Identifier: Apache-2.0
"""Clips for image-to-video: textured discs bounce over a textured ground. The first frames are
given; what is behind and on the discs can be found there and nowhere else."""

import torch
from torch.nn.functional import interpolate


def _texture(count, size, cells, generator, device):
    """[count, 3, size, size]: random colours from -1 to 1, blurred over a cell."""
    colours = torch.rand(count, 3, cells, cells, generator=generator).to(device) * 2 - 1
    return interpolate(colours, size=(size, size), mode="bilinear", align_corners=False)


def clips(count, frames, size, generator, discs=2, device="cpu"):
    """[count, 3, frames, size, size] with values from -1 to 1. The numbers are drawn on the CPU, so
    that every device gets the same clips."""
    cells = size // 4
    video = _texture(count, size, cells, generator, device)[:, :, None].repeat(1, 1, frames, 1, 1)
    place = torch.arange(size, device=device)
    time = torch.arange(frames, device=device)
    each = torch.arange(count, device=device)[:, None, None, None]
    for _ in range(discs):
        skin = _texture(count, size, cells, generator, device).permute(0, 2, 3, 1)
        radius = torch.rand(count, 1, 1, generator=generator).to(device)
        radius = size * (0.12 + 0.08 * radius)
        start, speed = torch.rand(2, count, 2, 1, generator=generator).to(device)
        # A triangle wave goes from wall to wall.
        path = (start * 2 + (speed - 0.5) * time * (8 / frames)) % 2
        centre = radius + (1 - (path - 1).abs()) * (size - 2 * radius)  # [count, 2, frames]
        y, x = (place - centre[:, axis].round().long()[..., None] for axis in (0, 1))
        inside = y[..., :, None] ** 2 + x[..., None, :] ** 2 < radius[..., None] ** 2
        moved = skin[each, (y % size)[..., :, None], (x % size)[..., None, :]]
        video = torch.where(inside[:, None], moved.permute(0, 4, 1, 2, 3), video)
    return video
