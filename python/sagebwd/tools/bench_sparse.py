# SPDX-License-Identifier: Apache-2.0
"""Times block-sparse attention and SLA2 against dense attention and FlexAttention's block masks.

    python -m sagebwd.bench_sparse                              # the cases of the record
    python -m sagebwd.bench_sparse "h8 n4096 d64" --sparsity .9,.95 --json sparse.json

The contestants of a case, bf16, one sequence, no mask:

sagebwd sla2
    The whole module :class:`sagebwd.sla2.Attention`: router, lists, both branches and α, with the
    gradient of α.
sagebwd sparse
    ``sagebwd.attention(q, k, v, blocks=lists)`` with the lists of that router, quantisation
    included.
flex
    Compiled FlexAttention with a block mask that lists the same blocks.
sagebwd dense, torch flash, torch cudnn
    Attention over all keys. "sagebwd dense cuda-sm80" has the kernels that lists have
    (on Hopper their forward has others).

All of them take turns within every round, with the blocks of every sparsity. The result is the
median over the rounds of the device's time (``bursts`` of timing.py). A peer that is missing, or
refuses a case, is named with the reason and left out.
"""

import argparse
import json
import os
import re
import statistics
import sys
from contextlib import contextmanager, nullcontext

import torch

from .. import sla2
from ..attention import attention
from ..suggest import Parser
from . import peers
from .timing import DIRECTIONS, bursts

CASES = [f"h{h} n{n} d{d}" for n in (32768, 8192) for h, d in ((16, 128), (32, 64))]
SPARSITIES = (0.8, 0.9, 0.95, 0.97)
#: The implementation that takes lists on every GPU, though on Hopper not their forward. Its dense
#: attention is what they are compared with.
LISTED = "cuda-sm80"
DENSE = {"cuda": ["torch flash", "torch cudnn"], "cpu": ["torch bf16"]}
#: Tiles of FlexAttention: its choice for an H200, cut to what fits into blocks of 128 x 64.
FLEX_TILES = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 128,
    "bwd_BLOCK_N2": 64,
}
#: Milliseconds that the device waits before a call, so that the host has queued all of it. The
#: module launches many small kernels.
HEAD_START = 10


def sizes_of(text):
    """h, n and d of a case such as "h16 n8192 d64"."""
    words = [re.fullmatch(r"(h|n|d)(\d+)", word) for word in text.split()]
    sizes = {word[1]: int(word[2]) for word in words if word}
    if not all(words) or set(sizes) != {"h", "n", "d"}:
        raise ValueError(f"case {text!r}: expected a text such as 'h16 n8192 d64'")
    return sizes


class Case:
    """Sizes, and the tensors that the contestants share: q, k, v and dout with tokens first, as a
    model has them, and again with heads first, as PyTorch's attention wants them."""

    def __init__(self, h, n, d, device):
        self.h, self.n, self.d, self.device = h, n, d, device
        g = torch.Generator(device).manual_seed(1)
        shape = (1, self.n, self.h, self.d)
        *leaves, self.dout = (
            torch.randn(shape, generator=g, device=device).to(torch.bfloat16) for _ in range(4)
        )
        self.leaves = [x.requires_grad_() for x in leaves]
        self.heads_first = [self._turned(x).requires_grad_() for x in leaves]
        self.dout_heads_first = self._turned(self.dout)

    @staticmethod
    def _turned(x):
        return x.detach().transpose(1, 2).contiguous()

    def __str__(self):
        return f"h{self.h} n{self.n} d{self.d}"


@contextmanager
def pinned(implementation):
    """Calls within go to this implementation."""
    before = os.environ.get("SAGEBWD_IMPL")
    os.environ["SAGEBWD_IMPL"] = implementation
    try:
        yield
    finally:
        del os.environ["SAGEBWD_IMPL"]
        if before is not None:
            os.environ["SAGEBWD_IMPL"] = before


class Contestant:
    """One implementation on one case (timing.py says what it must have)."""

    def __init__(self, name, sparsity, call, leaves, dout, context=nullcontext):
        self.name, self.sparsity, self.call, self.context = name, sparsity, call, context
        self.leaves, self.dout = leaves, dout
        self.times = {direction: [] for direction in DIRECTIONS}

    def forward(self):
        return self.call(*self.leaves[:3])

    def backward(self, out, retain_graph=False):
        torch.autograd.grad(out, self.leaves, self.dout, retain_graph=retain_graph)

    def label(self):
        return self.name if self.sparsity is None else f"{self.name} {100 * self.sparsity:g} %"


def block_mask(lists, tokens):
    """A mask of FlexAttention for blocks that count in full."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = lists.to_mask()
    count = mask.sum(-1, dtype=torch.int32)
    index = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    none = torch.zeros_like(count), torch.zeros_like(index)
    return BlockMask.from_kv_blocks(
        *none, count, index, BLOCK_SIZE=(lists.block_q, lists.block_k), seq_lengths=(tokens, tokens)
    )


def _flex(lists, tokens, flex):
    mask = block_mask(lists, tokens)
    return lambda q, k, v: flex(q, k, v, block_mask=mask, kernel_options=FLEX_TILES)


def contestants(case, sparsities, found, flex):
    """Those of a case, and {name: why not} of those that could not be made. ``found`` are dense
    peers, ``flex`` is FlexAttention or None."""
    turned = case.heads_first, case.dout_heads_first
    here = [Contestant("sagebwd dense", None, attention, case.leaves, case.dout)]
    if case.device == "cuda":
        ours = attention, case.leaves, case.dout, lambda: pinned(LISTED)
        here.append(Contestant(f"sagebwd dense {LISTED}", None, *ours))
    for p in found:
        call = lambda q, k, v, peer=p: peer.call(q, k, v, False)
        here.append(Contestant(p.name.removesuffix(" bf16"), None, call, *turned, p.context))
    missing = {}
    for sparsity in sparsities:
        layer = sla2.Attention(
            case.h, case.d, keep=1 - sparsity, rows=-(-case.n // 128), device=case.device
        )
        lists = layer.router.lists(*case.leaves[:2], layer.keep)
        if lists is None:
            raise ValueError(f"{case}: too short for a sparsity of {sparsity:g}")
        sparse = lambda q, k, v, lists=lists: attention(q, k, v, blocks=lists)
        learned = [p for p in layer.parameters() if p.requires_grad]
        here += [
            Contestant("sagebwd sla2", sparsity, layer, [*case.leaves, *learned], case.dout),
            Contestant("sagebwd sparse", sparsity, sparse, case.leaves, case.dout),
        ]
        if flex is not None:
            try:
                here.append(Contestant("flex", sparsity, _flex(lists, case.n, flex), *turned))
            except Exception as error:  # whatever is wrong with a foreign package
                missing[f"flex {100 * sparsity:g} %, {case}"] = _words(error)
    return here, missing


def _words(error):
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _trial(contestant):
    """Why a contestant does not run, or None."""
    try:
        with contestant.context():
            contestant.backward(contestant.forward())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        return _words(error)
    return None


def run_case(case, sparsities, found, flex, rounds):
    """The results of a case, and why contestants are not among them."""
    here, missing = contestants(case, sparsities, found, flex)
    for c in list(here):
        if why := _trial(c):
            if c.name.startswith("sagebwd"):
                raise RuntimeError(f"{c.label()}, {case}: {why}")
            here.remove(c)
            missing[f"{c.label()}, {case}"] = why
    bursts(here, case.device, rounds, HEAD_START)
    return [_entry(case, c) for c in here], missing


def _entry(case, contestant):
    entry = {"case": str(case), "implementation": contestant.name, "sparsity": contestant.sparsity}
    for direction in DIRECTIONS:
        ms = [1e3 * t for t in contestant.times[direction]]
        entry[direction] = {
            "median_ms": statistics.median(ms),
            "min_ms": min(ms),
            "max_ms": max(ms),
        }
    return entry


def _find_flex(device):
    """(FlexAttention, None), or (None, why not). On a CPU it runs as it is, for tests."""
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError as error:
        return None, _words(error)
    if device == "cuda":
        flex_attention = torch.compile(flex_attention, dynamic=False)
    return flex_attention, None


def table(entries):
    lines = []
    for case in dict.fromkeys(e["case"] for e in entries):
        lines.append(f"{case:28}" + "".join(f"{d + ' ms':>14}" for d in DIRECTIONS))
        for e in (e for e in entries if e["case"] == case):
            share = "" if e["sparsity"] is None else f" {100 * e['sparsity']:g} %"
            times = "".join(f"{e[d]['median_ms']:14.3f}" for d in DIRECTIONS)
            lines.append(f"  {e['implementation'] + share:26}{times}")
    return "\n".join(lines)


def main(arguments=None):
    parser = Parser(
        prog="python -m sagebwd.bench_sparse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", help=f"default: {', '.join(CASES)}")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--sparsity",
        metavar="SHARES",
        help="shares of blocks that are not seen (default "
        + ",".join(f"{s:g}" for s in SPARSITIES)
        + ")",
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    parser.add_argument("--json", metavar="FILE", help="write the record")
    args = parser.parse_args(arguments)
    try:
        shares = [float(s) for s in args.sparsity.split(",")] if args.sparsity else SPARSITIES
    except ValueError:
        parser.error(f"--sparsity: expected numbers such as .9,.95, got {args.sparsity!r}")
    try:
        cases = [sizes_of(text) for text in args.cases or CASES]
    except ValueError as error:
        parser.error(str(error))
    found, missing = peers.find(args.device, DENSE[args.device])
    flex, why = _find_flex(args.device)
    if why:
        missing["flex"] = why
    record = {"timing": "bursts", "rounds": args.rounds, "missing": missing, "results": []}
    for sizes in cases:
        try:
            case = Case(**sizes, device=args.device)
            entries, left_out = run_case(case, shares, found, flex, args.rounds)
        except ValueError as error:
            parser.error(str(error))
        print(table(entries), flush=True)
        for name, reason in left_out.items():
            print(f"{name}: left out: {reason}", file=sys.stderr)
        record["results"] += entries
        record["missing"].update(left_out)
        if args.json:  # after each case: the next one may end the process
            with open(args.json, "w") as out:
                json.dump(record, out, indent=1)
                out.write("\n")


if __name__ == "__main__":
    main()
