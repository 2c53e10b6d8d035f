# SPDX-License-Identifier: Apache-2.0
"""Times this library against the attention that is installed beside it.

    python -m sagebwd.bench                                       # the default cases
    python -m sagebwd.bench "b1 h8 n4096 d64 causal f32" --json cpu.json --plot cpu.png

A case is a line of sizes and words: ``b1 h8 hk2 n4096 d64 causal bf16 vectorwise``; ``documents``
cuts every n tokens into four texts and packs them. All contestants of a case take turns within
every round, so that a busy machine slows all of them alike. The result is the median over the
rounds. This library runs in the dtype of the case and in those of the peers, so that each peer is
compared with it in the peer's own dtype. Our times include everything: smoothing, quantisation,
set-up of both directions, allocation. ``--timing`` chooses between bursts, sustained load and the
wall time of small eager calls (timing.py says what each of them means).

A peer that is not installed, fails or crashes on a small case is named and left out. One that
refuses a case is left out of that case. On a CPU that
announces AMX but traps its use, PyTorch's bfloat16 attention crashes. The whole process then runs
under ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, and the record says so.
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from .. import __version__
from .._ops import attention as ops
from ..attention import attention, attention_varlen
from ..recipe import SCHEMES
from ..suggest import Parser, did_you_mean
from . import peers
from .timing import DIRECTIONS, WAYS

DEFAULT_CASES = {
    "cpu": [
        "b1 h8 n4096 d64 causal f32",
        "b1 h8 n4096 d64 full f32",
        "b1 h8 n4096 d128 causal f32",
        "b1 h8 n4096 d128 full f32",
    ],
    "cuda": [
        "b2 h16 n8192 d128 causal bf16",
        "b2 h16 n8192 d128 full bf16",
        "b2 h32 n4096 d64 causal bf16",
    ],
}
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# How the tokens of a row are cut into documents, in sixteenths.
_CUTS = (1, 2, 5, 8)


@dataclass
class Case:
    b: int = 1
    h: int = 8
    hk: int = 0  # 0: as h
    n: int = 1024
    d: int = 64
    causal: bool = False
    dtype: str = "f32"
    recipe: str = "vectorwise"
    documents: bool = False

    @staticmethod
    def parse(text):
        case = Case()
        for word in text.split():
            size = re.fullmatch(r"(b|hk|h|n|d)(\d+)", word)
            if size:
                setattr(case, size[1], int(size[2]))
            elif word in ("causal", "full"):
                case.causal = word == "causal"
            elif word in _DTYPES:
                case.dtype = word
            elif word in SCHEMES:
                case.recipe = word
            elif word == "documents":
                case.documents = True
            else:
                known = ("causal", "full", *_DTYPES, *SCHEMES, "documents")
                raise ValueError(f"case {text!r}: cannot read {word!r}{did_you_mean(word, known)}")
        case.hk = case.hk or case.h
        if case.documents and case.n % sum(_CUTS) != 0:
            raise ValueError(f"case {text!r}: documents need an n that {sum(_CUTS)} divides")
        return case

    def __str__(self):
        mask = "causal" if self.causal else "full"
        mask += " documents" if self.documents else ""
        return (
            f"b{self.b} h{self.h} hk{self.hk} n{self.n} d{self.d} {mask} {self.dtype} {self.recipe}"
        )

    def lengths(self):
        """Of the sequences of one row of the batch."""
        return [self.n * part // sum(_CUTS) for part in _CUTS] if self.documents else [self.n]

    def offsets(self, device):
        """Where the documents of the packed batch start and end."""
        ends = torch.tensor([0, *self.lengths() * self.b]).cumsum(0)
        return ends.to(device, torch.int32)

    def flops(self, direction):
        """Useful floating-point operations; a causal mask halves them."""
        matmuls = {"forward": 2, "backward": 5, "both": 7}[direction]
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths())
        return matmuls * 2 * self.b * self.h * pairs * self.d


class Contestant:
    """One implementation on one case: its tensors, and how to call it."""

    def __init__(self, name, call, dtype, case, device, context=nullcontext):
        self.name, self.dtype, self.context, self.case = name, dtype, context, case
        g = torch.Generator(device).manual_seed(1)

        def make(h):
            shape = (case.b * case.n, h, case.d) if case.documents else (case.b, h, case.n, case.d)
            return torch.randn(shape, generator=g, device=device).to(dtype)

        self.leaves = [make(h).requires_grad_() for h in (case.h, case.hk, case.hk)]
        self.dout = make(case.h)
        lengths = case.lengths()
        self.packing = (case.offsets(device), min(lengths), max(lengths)) if case.documents else ()
        self.call = call
        self.times = {direction: [] for direction in DIRECTIONS}

    def forward(self):
        return self.call(*self.leaves, self.case.causal, *self.packing)

    def backward(self, out, retain_graph=False):
        torch.autograd.grad(out, self.leaves, self.dout, retain_graph=retain_graph)


def _ours(recipe):
    def call(q, k, v, causal, offsets=None, shortest=None, longest=None):
        if offsets is None:
            return attention(q, k, v, layout="bhsd", causal=causal, recipe=recipe)
        return attention_varlen(
            q, k, v, offsets, offsets, longest, longest, causal=causal, recipe=recipe
        )

    return call


def contestants(case, device, found):
    found = [p for p in found if p.packed is not None] if case.documents else found
    here = {_DTYPES[case.dtype], *(p.dtype for p in found)}
    all_ = [
        Contestant(f"sagebwd {name}", _ours(case.recipe), dtype, case, device)
        for name, dtype in sorted(_DTYPES.items(), key=lambda item: item[0] != case.dtype)
        if dtype in here
    ]
    for p in found:
        call = p.packed if case.documents else p.call
        all_.append(Contestant(p.name, call, p.dtype, case, device, p.context))
    return all_


def _refusal(contestant, timing):
    """Why a peer does not run a case, or None."""
    try:
        with contestant.context():
            contestant.backward(contestant.forward(), retain_graph=timing == "sustained")
    except Exception as error:  # whatever is wrong with a foreign package
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


def run_case(case, device, found, rounds, timing="bursts", refused=None):
    """The results of a case, one entry per contestant. Peers that refuse it are left out and, if
    there is a dict ``refused``, named there with the reason."""
    all_ = contestants(case, device, found)
    for c in [c for c in all_ if not c.name.startswith("sagebwd")]:
        if why := _refusal(c, timing):
            all_.remove(c)
            if refused is not None:
                refused[f"{c.name}, {case}"] = why
    WAYS[timing][0](all_, device, rounds)
    ours = {c.dtype: c for c in reversed(all_)}  # the first of a dtype is this library
    return [_summary(case, c, ours[c.dtype]) for c in all_]


def _summary(case, contestant, ours):
    entry = {"case": str(case), "implementation": contestant.name}
    if contestant.name.startswith("sagebwd"):
        entry["kernels"] = {d: _kernels(case, contestant, d) for d in ("forward", "backward")}
    for direction in DIRECTIONS:
        if not contestant.times[direction]:
            continue
        ms = [1e3 * t for t in contestant.times[direction]]
        median = statistics.median(ms)
        ratios = [
            theirs / mine
            for mine, theirs in zip(ours.times[direction], contestant.times[direction])
        ]
        entry[direction] = {
            "median_ms": median,
            "min_ms": min(ms),
            "max_ms": max(ms),
            "gflops": case.flops(direction) / median / 1e6,
            # How many times the time of this library in the same dtype, round by round.
            "ratio_to_sagebwd": statistics.median(ratios),
        }
    return entry


def _kernels(case, contestant, direction):
    """Which of this library's implementations served a direction, such as cuda-sm80."""
    cu = contestant.packing[0] if case.documents else None
    options = ops.Options(cu, cu, causal=case.causal, recipe=case.recipe)
    answers = ops.explain(*contestant.leaves, options, is_backward=direction == "backward")
    return next(name for name, state, _ in answers if state == "chosen")


def table(entries):
    lines = []
    for case in dict.fromkeys(e["case"] for e in entries):
        rows = [e for e in entries if e["case"] == case]
        shown = [d for d in DIRECTIONS if d in rows[0]]
        lines.append(case)
        lines.append(f"  {'':20}" + "".join(f"{d + ' ms':>14}{'x':>7}" for d in shown))
        for e in rows:
            cells = "".join(
                f"{e[d]['median_ms']:14.3f}{e[d]['ratio_to_sagebwd']:7.2f}" for d in shown
            )
            lines.append(f"  {e['implementation']:20}{cells}")
    lines.append(
        "x: time in units of sagebwd's in the same dtype, median over the rounds; above 1 is slower"
    )
    return "\n".join(lines)


def machine(device):
    """What a record says about where it was made."""
    where = {
        "torch": torch.__version__,
        "sagebwd": __version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        where["gpu"] = torch.cuda.get_device_name()
        where["cuda"] = torch.version.cuda
    else:
        where["cpu"] = _cpu_name()
        where["threads"] = torch.get_num_threads()
        if peers.ISA_VARIABLE in os.environ:
            where[peers.ISA_VARIABLE] = os.environ[peers.ISA_VARIABLE]
    return where


def _cpu_name():
    try:
        with open("/proc/cpuinfo") as info:
            return next(
                line.split(":")[1].strip() for line in info if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor()


def _commit():
    def git(*arguments):
        return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "clean": commit != "" and git("status", "--porcelain") == ""}
    except OSError:
        return {"commit": "", "clean": False}


def plot(entries, path):
    """Bars of median times, one row per case and one column per direction. The numbers are
    relative to this library in the same dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(e["case"] for e in entries))
    names = list(dict.fromkeys(e["implementation"] for e in entries))
    figure, axes = pyplot.subplots(
        len(cases),
        len(DIRECTIONS),
        figsize=(4 * len(DIRECTIONS), 0.6 + len(cases) * (0.6 + 0.28 * len(names))),
        squeeze=False,
        sharey=True,
    )
    # This library in blue, lighter from dtype to dtype; the others in greys and browns.
    ours = iter(("#1f5fa8", "#6fa3d8", "#b5cfea"))
    others = itertools.cycle(("#555555", "#a0a0a0", "#8c6d4f", "#c2a988", "#d0d0d0"))
    colours = {name: next(ours if name.startswith("sagebwd") else others) for name in names}
    for row, case in zip(axes, cases):
        shown = {e["implementation"]: e for e in entries if e["case"] == case}
        for axis, direction in zip(row, DIRECTIONS):
            here = [name for name in names if direction in shown.get(name, ())]
            cells = [shown[name][direction] for name in here]
            times, colour = [c["median_ms"] for c in cells], [colours[name] for name in here]
            bars = axis.barh(here, times, color=colour)
            axis.bar_label(
                bars, [f"{c['ratio_to_sagebwd']:.2f}x" for c in cells], padding=3, fontsize=8
            )
            axis.margins(x=0.18)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(f"{direction}, ms" if axis is not row[0] else f"{case}\n{direction}, ms",
                           loc="left", fontsize=9)  # fmt: skip
    axes[0][0].invert_yaxis()  # of all: they share it
    figure.text(0.01, 0.005, "x: times sagebwd in the same dtype; above 1 is slower", fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=120)


def main(arguments=None):
    parser = Parser(
        prog="python -m sagebwd.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "cases", nargs="*", help=f"case lines; default on a CPU: {', '.join(DEFAULT_CASES['cpu'])}"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--timing", choices=list(WAYS), default="bursts", help="what to time (default bursts)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="timed rounds (default: " + ", ".join(f"{n} {w}" for w, (_, n) in WAYS.items()) + ")",
    )
    parser.add_argument("--threads", type=int, help="CPU threads of all contestants")
    parser.add_argument(
        "--peers",
        nargs="+",
        metavar="WORD",
        help="only peers whose names start with one of these, such as torch (default: all)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the record")
    parser.add_argument("--plot", metavar="FILE", help="draw the times (needs matplotlib)")
    args = parser.parse_args(arguments)
    rounds = args.rounds or WAYS[args.timing][1]
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        cases = [Case.parse(text) for text in args.cases or DEFAULT_CASES[args.device]]
    except ValueError as error:
        parser.error(str(error))
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'sagebwd[plot]'")
    found, missing = peers.find(args.device, args.peers)
    for name, why in missing.items():
        print(f"{name}: not usable here: {why}", file=sys.stderr)
    entries, refused = [], {}
    for case in cases:
        entries += run_case(case, args.device, found, rounds, args.timing, refused)
    for name, why in refused.items():
        print(f"{name}: left out: {why}", file=sys.stderr)
    print(f"{args.timing}\n{table(entries)}")
    if args.json:
        record = {
            "command": "python -m sagebwd.bench "
            + shlex.join(arguments if arguments is not None else sys.argv[1:]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **_commit(),
            "machine": machine(args.device),
            "timing": args.timing,
            "rounds": rounds,
            "missing": {**missing, **refused},
            "results": entries,
        }
        with open(args.json, "w") as out:
            json.dump(record, out, indent=1)
            out.write("\n")
    if args.plot:
        plot(entries, args.plot)


if __name__ == "__main__":
    main()
