# SPDX-License-Identifier: Apache-2.0
"""Other attention implementations that are installed here, for the benchmark. Each is a function of
q, k, v as [b, h, n, d] and a causal flag."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass
class Peer:
    name: str
    dtype: torch.dtype
    call: Callable  # (q, k, v, causal) -> out


def _sdpa(*backends):
    def call(q, k, v, causal):
        with sdpa_kernel(list(backends)):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


def _flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks = {}

    def call(q, k, v, causal):
        mask = None
        if causal:
            key = (q.shape[2], k.shape[2])
            if key not in masks:
                masks[key] = create_block_mask(
                    lambda b, h, i, j: i >= j, None, None, *key, device=q.device
                )
            mask = masks[key]
        return compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return call


def _flash(module):
    flash_attn_func = importlib.import_module(module).flash_attn_func

    def call(q, k, v, causal):
        out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


_PROBE = """
import torch, torch.nn.functional as F
q = torch.randn(1, 2, 128, 64).to(torch.{dtype}).requires_grad_()
F.scaled_dot_product_attention(q, q, q).float().sum().backward()
"""


def _survives(dtype):
    """Whether PyTorch's own CPU attention runs in this dtype. Some virtual machines announce AMX
    and then trap it, which ends the process; better another process than this one."""
    probe = [sys.executable, "-c", _PROBE.format(dtype=str(dtype)[6:])]
    return subprocess.run(probe, capture_output=True).returncode == 0


def find(device):
    """(peers, {name: why it is missing})."""
    if device == "cpu":
        return _cpu_peers()
    peers, missing = [], {}
    half = torch.bfloat16
    peers.append(Peer("torch flash bf16", half, _sdpa(SDPBackend.FLASH_ATTENTION)))
    peers.append(Peer("torch cudnn bf16", half, _sdpa(SDPBackend.CUDNN_ATTENTION)))
    candidates = {
        "flex bf16": _flex,
        "flash-attn 2 bf16": lambda: _flash("flash_attn"),
        "flash-attn 3 bf16": lambda: _flash("flash_attn_interface"),
    }
    for name, make in candidates.items():
        try:
            peers.append(Peer(name, half, make()))
        except ImportError as error:
            missing[name] = str(error)
    return peers, missing


def _cpu_peers():
    peers, missing = [Peer("torch f32", torch.float32, _sdpa(SDPBackend.FLASH_ATTENTION))], {}
    if _survives(torch.bfloat16):
        peers.append(Peer("torch bf16", torch.bfloat16, _sdpa(SDPBackend.FLASH_ATTENTION)))
    else:
        missing["torch bf16"] = (
            "PyTorch's own bfloat16 attention dies on this CPU (try ONEDNN_MAX_CPU_ISA)"
        )
    return peers, missing
