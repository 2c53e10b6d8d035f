# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a token, and the peak they are compared with (MFU)."""

import torch

#: Dense BF16 peaks by a word of the device's name, in TFLOP/s, as the maker states them.
_BF16_PEAKS = {
    "H200": 989, "H100": 989, "GH200": 989, "B200": 2250, "A100": 312, "L40S": 362,
    "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def per_token(config, padded_vocab):
    """Forward and backward: 6 per weight of a matmul, and the six matmuls of causal attention.
    Recomputation is not counted."""
    c = config
    kv = (c.kv_heads or c.heads) * c.head_dim
    weights = c.layers * (c.width * (2 * c.width + 2 * kv) + 3 * c.width * c.ffn)
    weights += padded_vocab * c.width
    attention = c.layers * 6 * c.width * c.context
    return 6 * weights + attention


def peak(device, dtype):
    """(operations per second or None, where the figure comes from or why there is none). Only a
    stated peak is used. What a matmul reaches at some moment on a shared or turbo-clocked machine
    is no bound, so a share of that could exceed 100 %."""
    if device.type != "cuda":
        return None, "a CPU has no stated peak"
    name = torch.cuda.get_device_name(device)
    if dtype != torch.bfloat16:
        return None, f"no peak is known for {str(dtype)[6:]}"
    for word, tera in _BF16_PEAKS.items():
        if word in name:
            return tera * 1e12, f"{word} BF16 peak of {tera} TFLOP/s"
    return None, f"no peak is known for {name}"
