# SPDX-License-Identifier: Apache-2.0
"""A small video transformer that predicts the velocity of flow matching."""

from dataclasses import dataclass

import torch
from torch import nn

from ..attention import Attention
from ..token_order import box_order


@dataclass(frozen=True)
class Size:
    frames: int = 8
    given: int = 2  # frames that the model is told
    pixels: int = 64  # of a side
    cells: int = 5  # colours along a side of a texture; see clips
    patch: int = 4
    layers: int = 3
    heads: int = 2
    head_dim: int = 64
    box: tuple = (4, 4, 4)  # tokens of a block
    block_q: int = 64
    block_k: int = 64

    @property
    def grid(self):
        side = self.pixels // self.patch
        return self.frames, side, side

    @property
    def tokens(self):
        frames, height, width = self.grid
        return frames * height * width


def make_attention(size, kind=Attention):
    return kind(
        size.heads,
        size.head_dim,
        keep=1,
        rows=-(-size.tokens // size.block_q),
        block_q=size.block_q,
        block_k=size.block_k,
        order=size.box,
    )


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        width = size.heads * size.head_dim
        self.size = size
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head_norms = nn.ModuleList(nn.RMSNorm(size.head_dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend = make_attention(size)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(approximate="tanh"), nn.Linear(3 * width, width)
        )

    def forward(self, x, time):
        """time: a shift of the norms' output."""
        y = self.norms[0](x) + time
        q, k, v = self.qkv(y).unflatten(-1, (3, self.size.heads, -1)).unbind(2)
        q, k = self.head_norms[0](q), self.head_norms[1](k)
        x = x + self.out(self.attend(q, k, v).flatten(2).to(x.dtype))
        return x + self.mlp(self.norms[1](x) + time)


class Model(nn.Module):
    """video [b, 3, frames, h, w] with noise and times [b] → velocity of the same shape. Given
    frames come without noise."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        width = size.heads * size.head_dim
        channels = 3 * size.patch**2
        self.inward = nn.Linear(channels, width)
        self.given = nn.Parameter(torch.zeros(width))
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.outward = nn.LayerNorm(width), nn.Linear(width, channels)
        nn.init.zeros_(self.outward.weight)
        order = box_order(size.grid, size.box)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("places", _places(size.grid, width)[order], persistent=False)
        is_given = order < size.given * size.grid[1] * size.grid[2]
        self.register_buffer("is_given", is_given[:, None], persistent=False)

    def forward(self, video, time):
        x = self.inward(self.patches(video)) + self.places + self.is_given * self.given
        shift = self.time(_waves(time * 100, 64))[:, None]
        for block in self.blocks:
            x = block(x, shift)
        return self.video(self.outward(self.norm(x)))

    def patches(self, video):
        p = self.size.patch
        x = video.unflatten(4, (-1, p)).unflatten(3, (-1, p))  # b c f h p w p
        return x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)[:, self.order]

    def video(self, patches):
        p, grid = self.size.patch, self.size.grid
        x = torch.empty_like(patches)
        x[:, self.order] = patches
        x = x.unflatten(1, grid).unflatten(-1, (3, p, p))  # b f h w c p p
        return x.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)


def _waves(x, channels):
    """Sines and cosines of x [n], from slow to fast: [n, channels]."""
    speed = torch.exp(torch.linspace(0, -4, channels // 2, device=x.device))
    angle = x[:, None] * speed
    return torch.cat((angle.sin(), angle.cos()), -1)


def _places(grid, width):
    """[tokens, width] in raster order: a third of the channels for each axis."""
    share = width // 6 * 2
    axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in grid), indexing="ij")
    parts = [_waves(axis.flatten() * 1.5, share) for axis in axes]
    parts.append(torch.zeros(parts[0].shape[0], width - 3 * share))
    return torch.cat(parts, -1)
