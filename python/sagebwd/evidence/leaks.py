# SPDX-License-Identifier: Apache-2.0
"""Which attentions let later tokens change earlier outputs, and by how much?

    python -m sagebwd.evidence leaks       # about two minutes on two cores

Asks sagebwd.leaks of PyTorch's attention, of the recipes here, of FP8 attention as its scales are
published, and of SageAttention where it is installed (pip install --no-deps sageattention). Without
a GPU Triton's interpreter runs its kernels on the CPU: start the command with TRITON_INTERPRET=1 in
its environment. Writes leaks.json.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import math
import os
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from ..attention import attention
from ..suggest import Parser
from ..tools.leakage import leaks
from ..train.errors import BadInput, exit_code, writing
from . import record

#: What later tokens become, or which published inputs are taken.
COLUMNS = ("ordinary", "20 times as large", "NaN or Inf", "TransformerEngine#3248")
_TINY = 2.0**-126  # keeps a scale of zeros from dividing by zero


def _pytorch(q, k, v):
    """q, k, v: [batch, heads, tokens, channels]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _of_float64(q, k, v):
    return _pytorch(q.double(), k.double(), v.double()).to(v.dtype)


def _fp8(x, dims):
    """E4M3 codes with one scale over ``dims``, as values."""
    scale = x.abs().amax(dims, keepdim=True).double().clamp_min(_TINY) / 448
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


def _fp8_by_head(q, k, v):
    """One scale for all tokens of a head, as FlashAttention-3 takes them."""
    return _of_float64(*(_fp8(x, (2, 3)) for x in (q, k, v))).to(q.dtype)


def _mx(x, dim):
    """MXFP8: 32 neighbours along ``dim`` share a power of two."""
    missing = -x.shape[dim] % 32
    padding = [0, 0] * (x.dim() - 1 - dim) + [0, missing]
    blocks = F.pad(x.double(), padding).unflatten(dim, (-1, 32))
    top = blocks.abs().amax(dim + 1, keepdim=True).clamp_min(_TINY)
    scale = torch.exp2(torch.floor(torch.log2(top)) - 8)
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    return (codes * scale).flatten(dim, dim + 1).narrow(dim, 0, x.shape[dim])


def _fp8_mx(q, k, v):
    """Blocks lie along what a product sums: channels of Q and K, tokens of V."""
    return _of_float64(_mx(q, 3), _mx(k, 3), _mx(v, 2)).to(q.dtype)


def _ours(recipe):
    return functools.partial(attention, causal=True, layout="bhsd", recipe=recipe)


def _sage(device):
    """SageAttention, or its kernels in Triton's interpreter."""
    from sageattention import core

    def on_gpu(q, k, v):
        # The original subtracts the mean of K in place.
        return core.sageattn(q, k.clone(), v, tensor_layout="HND", is_causal=True)

    def on_cpu(q, k, v):
        k = k - k.mean(2, keepdim=True)
        options = dict(tensor_layout="HND")
        q8, q_scale, k8, k_scale = core.per_block_int8(q, k, sm_scale=q.shape[3] ** -0.5, **options)
        v = v.to(torch.float16)
        return core.attn_true(q8, k8, v, q_scale, k_scale, output_dtype=q.dtype, **options)

    return on_cpu if device == "cpu" else on_gpu


def rows_for(device):
    """(name, what it is, function) of every attention that can be had here."""
    yield "PyTorch, BF16", "scaled_dot_product_attention", _pytorch
    for recipe in ("vectorwise", "paper"):
        yield f"`{recipe}`", "INT8, this library", _ours(recipe)
    if why_no_sage(device) is None:
        version = importlib.metadata.version("sageattention")
        where = ", in Triton's interpreter" if device == "cpu" else ""
        yield f"SageAttention {version}", f"INT8 Q and K{where}", _sage(device)
    yield "FP8, a scale per head", "FlashAttention-3's scales, emulated", _fp8_by_head
    yield "MXFP8", "blocks of 32, emulated", _fp8_mx


def why_no_sage(device):
    for package in ("sageattention", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "without a GPU it needs TRITON_INTERPRET=1 in the environment"
    return None


def measure(name, words, fn, options):
    """The row of one attention: its error, and the largest change of each column."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, options["tokens"], 64, device=options["device"]).to(torch.bfloat16)
        for _ in range(3)
    )
    exact = _pytorch(q.double(), k.double(), v.double())
    error = (fn(q, k, v).double() - exact).norm() / exact.norm()
    found = leaks(fn, layout="bhsd", dtype=torch.bfloat16, **options)
    changes = {}
    for column in COLUMNS:
        mine = [c for c in found.changes if _column(c.case) == column]
        changed = sum(c.changed for c in mine)
        worst = max(c.relative for c in mine)
        changes[column] = {
            "rows": sum(c.rows for c in mine),
            "changed": changed,
            "relative": worst if math.isfinite(worst) else None,  # JSON has no infinity
            "words": _words(worst) if changed else "not a bit",
        }
    return {
        "attention": name,
        "words": words,
        "error": error.item(),
        "leaks": bool(found),
        "repeats": found.repeats,
        "changes": changes,
    }


def _column(case):
    """Where a case of sagebwd.leaks belongs. Other values of one tensor are 20 times as large."""
    if case.startswith(("20 times", "other values of")):
        return "20 times as large"
    if case.startswith(("NaN", "Inf")):
        return "NaN or Inf"
    return "TransformerEngine#3248" if case.startswith("TransformerEngine") else "ordinary"


def _words(relative):
    if math.isinf(relative):
        return "NaN or Inf"
    return f"{100 * relative:.0f} %" if relative >= 0.1 else f"{100 * relative:.2g} %"


def main(arguments):
    parser = Parser(
        prog="python -m sagebwd.evidence leaks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", default="build/evidence", help="directory (default %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=200, help="of a sequence (%(default)s)")
    args = parser.parse_args(arguments)
    return exit_code("evidence leaks", lambda: _work(args, arguments))


def _work(args, arguments):
    if args.tokens < 70:
        raise BadInput(f"tokens: expected 70 or more, several blocks of keys, got {args.tokens}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device: PyTorch finds no GPU here; use --device cpu")
    out = Path(args.out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    stamp = record.stamp(["leaks", *arguments], args.device)
    if why := why_no_sage(args.device):
        print(f"SageAttention is left out: {why}")
    elif args.device == "cpu":
        stamp["command"] = "TRITON_INTERPRET=1 " + stamp["command"]
    rows = []
    for name, words, fn in rows_for(args.device):
        options = dict(tokens=args.tokens, device=args.device, seed=1)
        with warnings.catch_warnings():  # NumPy, below Triton's interpreter, warns of NaN and Inf
            warnings.simplefilter("ignore", RuntimeWarning)
            rows.append(measure(name, words, fn, options))
        cells = "; ".join(f"{c}: {x['words']}" for c, x in rows[-1]["changes"].items())
        print(f"{name} ({words}), error {100 * rows[-1]['error']:.2g} %: {cells}", flush=True)
    with writing(out):
        record.write(out, "leaks", {**stamp, "tokens": args.tokens, "rows": rows})
    print(out / "leaks.json")
