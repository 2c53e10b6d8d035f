# SPDX-License-Identifier: Apache-2.0
"""Times this library against the attention that is installed beside it.

    python -m sagebwd.bench                                       # the default cases
    python -m sagebwd.bench "b1 h8 n4096 d64 causal f32" --json cpu.json --plot cpu.png

A case is a line of sizes and words: ``b1 h8 hk2 n4096 d64 causal bf16 vectorwise``. All contestants
of a case take turns within every round, so that a busy machine slows all of them alike. The result
is the median over the rounds. This library runs in the dtype of the case and in those of the peers,
so that each peer is compared with it in the peer's own dtype. Our times include everything:
smoothing, quantisation, set-up of both directions, allocation. On a GPU they are the device's time
between events.

A peer that is not installed, fails or crashes on a small case is named and left out. On a CPU that
announces AMX but traps its use, PyTorch's bfloat16 attention crashes. The whole process then runs
under ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, and the record says so.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from . import __version__, ops, peers
from .attention import attention
from .suggest import Parser, did_you_mean

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
DIRECTIONS = ("forward", "backward", "both")


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
            elif word in ("vectorwise", "paper"):
                case.recipe = word
            else:
                known = ("causal", "full", *_DTYPES, "vectorwise", "paper")
                raise ValueError(f"case {text!r}: cannot read {word!r}{did_you_mean(word, known)}")
        case.hk = case.hk or case.h
        return case

    def __str__(self):
        mask = "causal" if self.causal else "full"
        return (
            f"b{self.b} h{self.h} hk{self.hk} n{self.n} d{self.d} {mask} {self.dtype} {self.recipe}"
        )

    def flops(self, direction):
        """Useful floating-point operations; a causal mask halves them."""
        matmuls = {"forward": 2, "backward": 5, "both": 7}[direction]
        pairs = self.n * (self.n + 1) // 2 if self.causal else self.n * self.n
        return matmuls * 2 * self.b * self.h * pairs * self.d


class Contestant:
    """One implementation on one case: its tensors, and a timed step."""

    def __init__(self, name, call, dtype, case, device):
        self.name, self.call, self.causal, self.device = name, call, case.causal, device
        self.dtype = dtype
        g = torch.Generator(device).manual_seed(1)
        make = lambda h: torch.randn(case.b, h, case.n, case.d, generator=g, device=device).to(
            dtype
        )
        self.leaves = [make(h).requires_grad_() for h in (case.h, case.hk, case.hk)]
        self.dout = make(case.h)
        self.times = {direction: [] for direction in DIRECTIONS}

    def step(self):
        """Seconds of a forward and of a backward."""
        clock = _DeviceClock() if self.device == "cuda" else _HostClock()
        out = self.call(*self.leaves, self.causal)
        clock.mark()
        torch.autograd.grad(out, self.leaves, self.dout)
        clock.mark()
        return clock.laps()

    def record(self):
        forward, backward = self.step()
        for direction, t in zip(DIRECTIONS, (forward, backward, forward + backward)):
            self.times[direction].append(t)


class _HostClock:
    def __init__(self):
        self.marks = [time.perf_counter()]

    def mark(self):
        self.marks.append(time.perf_counter())

    def laps(self):
        return [b - a for a, b in zip(self.marks, self.marks[1:])]


class _DeviceClock:
    """Time on the device, between events. The device first idles until the host has queued the
    work: in training the host runs ahead of the device too."""

    _CYCLES = 2_000_000  # about a millisecond

    def __init__(self):
        self.events = []
        torch.cuda._sleep(self._CYCLES)
        self.mark()

    def mark(self):
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def laps(self):
        self.events[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self.events, self.events[1:])]


def contestants(case, device, found):
    ours = lambda q, k, v, causal: attention(
        q, k, v, layout="bhsd", causal=causal, recipe=case.recipe
    )
    here = {_DTYPES[case.dtype], *(p.dtype for p in found)}
    all_ = [
        Contestant(f"sagebwd {name}", ours, dtype, case, device)
        for name, dtype in sorted(_DTYPES.items(), key=lambda item: item[0] != case.dtype)
        if dtype in here
    ]
    return all_ + [Contestant(p.name, p.call, p.dtype, case, device) for p in found]


def run_case(case, device, found, rounds):
    """Runs every contestant once per round and rotates the order by one each time."""
    all_ = contestants(case, device, found)
    for c in all_:
        for _ in range(3 if device == "cuda" else 1):  # clocks, plans and caches warm up
            c.step()
    for r in range(rounds):
        for c in all_[r % len(all_) :] + all_[: r % len(all_)]:
            c.record()
    ours = {c.dtype: c for c in reversed(all_)}  # the first of a dtype is this library
    return [_summary(case, c, ours[c.dtype]) for c in all_]


def _summary(case, contestant, ours):
    entry = {"case": str(case), "implementation": contestant.name}
    if contestant.name.startswith("sagebwd"):
        entry["kernels"] = {d: _kernels(case, contestant, d) for d in ("forward", "backward")}
    for direction in DIRECTIONS:
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
    options = ops.Options(causal=case.causal, recipe=case.recipe)
    answers = ops.explain(*contestant.leaves, options, is_backward=direction == "backward")
    return next(name for name, state, _ in answers if state == "chosen")


def table(entries):
    lines = []
    for case in dict.fromkeys(e["case"] for e in entries):
        lines.append(case)
        lines.append(f"  {'':20}" + "".join(f"{d + ' ms':>14}{'x':>7}" for d in DIRECTIONS))
        for e in (e for e in entries if e["case"] == case):
            cells = "".join(
                f"{e[d]['median_ms']:14.2f}{e[d]['ratio_to_sagebwd']:7.2f}" for d in DIRECTIONS
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
    others = iter(("#555555", "#a0a0a0", "#8c6d4f", "#c2a988", "#d0d0d0"))
    colours = [next(ours if name.startswith("sagebwd") else others) for name in names]
    for row, case in zip(axes, cases):
        shown = {e["implementation"]: e for e in entries if e["case"] == case}
        for axis, direction in zip(row, DIRECTIONS):
            cells = [shown[name][direction] for name in names]
            bars = axis.barh(names, [c["median_ms"] for c in cells], color=colours)
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
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
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
    entries = []
    for case in cases:
        entries += run_case(case, args.device, found, args.rounds)
    print(table(entries))
    if args.json:
        record = {
            "command": "python -m sagebwd.bench "
            + shlex.join(arguments if arguments is not None else sys.argv[1:]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **_commit(),
            "machine": machine(args.device),
            "rounds": args.rounds,
            "missing": missing,
            "results": entries,
        }
        with open(args.json, "w") as out:
            json.dump(record, out, indent=1)
            out.write("\n")
    if args.plot:
        plot(entries, args.plot)


if __name__ == "__main__":
    main()
