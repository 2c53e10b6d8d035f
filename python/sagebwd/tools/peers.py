# SPDX-License-Identifier: Apache-2.0
"""Other attention implementations that are installed here, for the benchmark. Each is a function of
q, k, v as [b, h, n, d] and a causal flag; some have another one for packed documents.

Every candidate first computes a small case, forward and backward, in a separate process
(``python -m sagebwd.tools.peers cpu``). A candidate that cannot be imported, raises or crashes is
left out, with the reason.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass
class Peer:
    name: str
    dtype: torch.dtype
    call: Callable  # (q, k, v, causal) -> out
    packed: Optional[Callable] = None  # ([t, h, d] x 3, causal, offsets, shortest, longest) -> out
    context: Callable = nullcontext  # makes a context in which to call


def _sdpa(backend):
    """PyTorch's attention. The context that selects a backend takes a while to enter and to leave,
    so it is not part of a call."""

    def call(q, k, v, causal):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    def packed(q, k, v, causal, offsets, shortest, longest):
        sizes = dict(offsets=offsets.long(), min_seqlen=shortest, max_seqlen=longest)
        nested = (torch.nested.nested_tensor_from_jagged(t, **sizes) for t in (q, k, v))
        heads_first = (t.transpose(1, 2) for t in nested)
        out = F.scaled_dot_product_attention(*heads_first, is_causal=causal)
        return out.transpose(1, 2).values()

    return {"call": call, "packed": packed, "context": lambda: sdpa_kernel([backend])}


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

    return {"call": call}


def _flash(module):
    flash_attn_func = importlib.import_module(module).flash_attn_func

    def call(q, k, v, causal):
        out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return {"call": call}


_CANDIDATES = {  # device -> name -> (dtype, what makes the functions of a Peer)
    "cpu": {
        "torch f32": (torch.float32, lambda: _sdpa(SDPBackend.FLASH_ATTENTION)),
        "torch bf16": (torch.bfloat16, lambda: _sdpa(SDPBackend.FLASH_ATTENTION)),
    },
    "cuda": {
        "torch flash bf16": (torch.bfloat16, lambda: _sdpa(SDPBackend.FLASH_ATTENTION)),
        "torch cudnn bf16": (torch.bfloat16, lambda: _sdpa(SDPBackend.CUDNN_ATTENTION)),
        "torch efficient bf16": (torch.bfloat16, lambda: _sdpa(SDPBackend.EFFICIENT_ATTENTION)),
        "flex bf16": (torch.bfloat16, _flex),
        "flash-attn 2 bf16": (torch.bfloat16, lambda: _flash("flash_attn")),
        "flash-attn 3 bf16": (torch.bfloat16, lambda: _flash("flash_attn_interface")),
    },
}


def find(device, wanted=None):
    """(peers, {name: why it cannot be used here}) of those whose names start with one of
    ``wanted``, or of all. If PyTorch's bfloat16 attention runs only with fewer instruction sets of
    oneDNN, the limit stays for the rest of this process."""
    peers, unusable = [], {}
    names = [n for n in _CANDIDATES[device] if not wanted or n.startswith(tuple(wanted))]
    for name, why in _usable(device, names).items():
        if why is None:
            dtype, make = _CANDIDATES[device][name]
            peers.append(Peer(name, dtype, **make()))
        else:
            unusable[name] = why
    return peers, unusable


# --- trying them out ------------------------------------------------------------------------------

# Some virtual machines announce AMX and then trap it. PyTorch's bfloat16 products use oneDNN, which
# trusts the announcement. oneDNN reads this variable when it first runs.
ISA_VARIABLE, ISA_WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"


def _usable(device, names=None):
    """{name: None, or why not}"""
    found = _try(device, list(_CANDIDATES[device]) if names is None else names)
    trapped = [name for name, why in found.items() if why == _death(-signal.SIGILL)]
    if trapped and ISA_VARIABLE not in os.environ:
        again = _try(device, trapped, {ISA_VARIABLE: ISA_WITHOUT_AMX})
        if None in again.values():
            os.environ[ISA_VARIABLE] = ISA_WITHOUT_AMX
            found.update(again)
    return found


_MARK = "sagebwd.tools.peers\t"  # of the lines that answer; packages print things too


def _try(device, names, environment=None):
    """Runs all candidates in one process. If one of them crashes it, the rest get a new one."""
    found = {}
    while len(found) < len(names):
        left = [name for name in names if name not in found]
        done = subprocess.run(
            [sys.executable, "-m", "sagebwd.tools.peers", device, *left],
            capture_output=True,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        lines = [line.split("\t") for line in done.stdout.splitlines() if line.startswith(_MARK)]
        found.update({name: why or None for _, name, why in lines})
        if len(lines) < len(left):
            last = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
            found[left[len(lines)]] = _death(done.returncode) if done.returncode < 0 else last
    return found


def _death(returncode):
    return f"its process died of {signal.Signals(-returncode).name}"


def _answer(device, name):
    """None, or why the candidate cannot run."""
    dtype, make = _CANDIDATES[device][name]
    try:
        peer = Peer(name, dtype, **make())
        q = torch.randn(1, 2, 128, 64, device=device).to(dtype).requires_grad_()
        with peer.context():
            peer.call(q, q, q, True).float().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # whatever is wrong with a foreign package
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        print(f"{_MARK}{_name}\t{_answer(sys.argv[1], _name) or ''}", flush=True)
