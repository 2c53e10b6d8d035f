# SPDX-License-Identifier: Apache-2.0
"""python -m sagebwd.sla2.demo: trains a small image-to-video model with full attention on clips
made on the fly, then changes its attention and trains on, and writes one page with the results."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from ...recipe import SCHEMES
from ...suggest import Parser
from ...train.files import write_text
from .arms import ARMS
from .experiment import Experiment, Folder, arms_of, shown_clip
from .model import Model, Size
from .page import write_page
from .summary import checks, summary, verdict
from .train import OutOfTime

#: Exit status of a call whose time was up; a call with --resume goes on.
UNFINISHED = 5

#: Options that say where and how long, not what.
_OUTSIDE = ("out", "resume", "limit", "device")
_SIZES = ("frames", "pixels", "patch", "layers", "heads")


def _list_of(kind):
    return lambda text: [kind(word) for word in text.split(",")]


def main(arguments=None):
    began = time.monotonic()
    parser = Parser(prog="python -m sagebwd.sla2.demo", description=__doc__, allow_abbrev=False)
    number = lambda name, value, words: parser.add_argument(
        f"--{name}", type=type(value), default=value, help=f"{words} (default {value})"
    )
    parser.add_argument("--out", type=Path, default=Path("build/sla2"))
    parser.add_argument(
        "--resume", action="store_true", help="go on with what is in the folder OUT"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf,
        help=f"seconds after which to stop with status {UNFINISHED}",
    )  # fmt: skip
    parser.add_argument("--arms", default="full,sparse,sla2", help=f"of {','.join(ARMS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--recipe", choices=(*SCHEMES, "exact"), default="vectorwise")
    parser.add_argument(
        "--keep", type=_list_of(float), default=[0.1],
        help="shares of key blocks that a block of queries sees (default 0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=_list_of(int), default=[0],
        help="seeds of the clips after the change of attention (default 0)",
    )  # fmt: skip
    number("steps", 400, "training with full attention")
    number("tune", 80, "training with each kind of attention")
    number("fit", 40, "steps of stage 1 for each layer")
    number("batch", 1, "clips of a step")
    number("lr", 3e-3, "learning rate; a fifth of it after the change")
    number("measured", 8, "held-out batches")
    size = Size()
    for name in _SIZES:
        number(name, getattr(size, name), "of the model")
    number("cells", size.cells, "colours along a side of a texture; 0: one for every 4 pixels")
    number("block", 64, "queries of a block: 64 or 128")
    args = parser.parse_args(arguments)
    kinds = args.arms.split(",")
    unknown = [name for name in kinds if name not in ARMS]
    if unknown:
        parser.error(f"--arms: expected some of {', '.join(ARMS)}, got {', '.join(unknown)}")
    size = replace(
        size,
        block_q=args.block,
        **{n: getattr(args, n) for n in (*_SIZES, "cells")},
    )
    say = lambda words: print(f"[{time.monotonic() - began:6.1f} s] {words}", flush=True)
    settings = {n: value for n, value in vars(args).items() if n not in _OUTSIDE}
    try:
        folder = Folder(args.out, settings, args.resume)
    except ValueError as error:
        parser.error(str(error))
    arms = arms_of(kinds, args.keep, args.seed)
    status = 0
    try:
        Experiment(args, size, folder, say).run(arms, began + args.limit)
    except OutOfTime as stop:
        status = UNFINISHED
        say(f"The time is up: {stop}. The same command with --resume goes on.")
    done = [arm for arm in arms if folder.figures(arm)]
    say(f"{len(done)} of {len(arms)} arms are finished.")
    if done:
        report(args, size, settings, folder, done, len(arms))
    return status


def report(args, size, settings, folder, arms, total):
    """Writes sla2.json and the page."""
    runs = [folder.figures(arm) for arm in arms]
    found = summary(runs)
    record = {
        "about": f"Image-to-video flow matching on clips made on the fly: {size.tokens} tokens, "
        f"blocks of {size.block_q} × {size.block_k}.",
        "plan": f"{args.steps} steps with full attention; from there, {args.tune} steps with each "
        f"kind of attention, on the same clips; batch {args.batch}. Loss of held-out clips at "
        "fixed times and noise; PSNR in dB.",
        "finished": f"{len(arms)} of {total} arms",
        "tokens": size.tokens,
        "settings": settings,
        "summary": found,
        "checks": checks(runs),
        "runs": runs,
    }
    write_text(folder.path / "sla2.json", json.dumps(record, indent=1) + "\n")
    pictures = {arm: folder.tensors(arm) for arm in arms if arm.seed == args.seed[0]}
    clip = shown_clip(size, args.device)[0].cpu()
    write_page(record, clip, pictures, Model(size), folder.path / "sla2.html")
    for keep, figures in found.items():
        print(verdict(keep, figures))
    print(f"The page with all of this is {folder.path / 'sla2.html'}.")


if __name__ == "__main__":
    sys.exit(main())
