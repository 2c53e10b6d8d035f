# SPDX-License-Identifier: Apache-2.0
"""Pictures for a page, as PNG inside of it."""

import base64
import struct
import zlib
from html import escape

import torch


def png(pixels):
    """The bytes of a picture: uint8 [h, w, 3]."""
    height, width, _ = pixels.shape
    rows = torch.cat((torch.zeros(height, 1, dtype=torch.uint8), pixels.flatten(1)), 1)
    chunk = lambda kind, data: (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(rows.flatten().tolist()), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def image(pixels, alt, width, squares=False):
    """An <img> of values from -1 to 1, [3, h, w]. ``squares``: each of them is drawn as a square;
    otherwise the browser smooths."""
    pixels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).cpu()
    data = base64.b64encode(png(pixels)).decode()
    return (
        f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}" '
        f'style="width:{width};display:block{";image-rendering:pixelated" if squares else ""}">'
    )


def some_frames(clip, most=8):
    """At most so many frames of a clip [3, frames, h, w], the first and the last among them."""
    count = clip.shape[1]
    return clip[:, torch.linspace(0, count - 1, min(count, most)).round().long()]


def strip(video):
    """The frames of a clip [3, frames, h, w] side by side, with a gap: [3, h, w]."""
    gap = torch.ones(3, video.shape[2], 2, device=video.device)
    frames = [part for frame in video.unbind(1) for part in (frame, gap)]
    return torch.cat(frames[:-1], 2)


def matrix(mask):
    """A bool matrix, dark where true: [3, h, w]."""
    return (1 - 1.6 * mask.float()).expand(3, -1, -1)
