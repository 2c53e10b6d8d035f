# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a token, and the peak they are compared with (MFU)."""

import functools
import time

import torch

#: Dense BF16 peaks by a word of the device's name, in TFLOP/s, as the maker states them.
_BF16_PEAKS = {
    "H200": 989, "H100": 989, "GH200": 989, "B200": 2250, "A100": 312, "L40S": 362,
    "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def per_token(config, padded_vocab):
    """Forward and backward: 6 per weight of a matmul, and the six matmuls of causal attention
    (what recomputes a result counts nothing)."""
    c = config
    kv = (c.kv_heads or c.heads) * c.head_dim
    weights = c.layers * (c.width * (2 * c.width + 2 * kv) + 3 * c.width * c.ffn)
    weights += padded_vocab * c.width
    attention = c.layers * 6 * c.width * c.context
    return 6 * weights + attention


@functools.cache
def peak(device, dtype):
    """(operations per second, where the figure comes from). Asked once: runs side by side share
    it."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for word, tera in _BF16_PEAKS.items():
            if word in name:
                return tera * 1e12, f"{word} BF16 peak of {tera} TFLOP/s"
    return _measured(device, dtype)


def _measured(device, dtype):
    """The rate of a matmul that fills the device."""
    n = 1024 if device.type == "cpu" else 8192
    own = torch.Generator(device).manual_seed(0)  # a run's random numbers stay as they were
    a = torch.rand(n, n, device=device, dtype=dtype, generator=own)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    rate = 2 * n**3 / best
    return rate, f"measured {str(dtype)[6:]} matmul rate of {rate / 1e12:.3g} TFLOP/s"
