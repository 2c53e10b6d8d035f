# SPDX-License-Identifier: Apache-2.0
"""python -m sagebwd.sla2.demo: trains a small image-to-video model with full attention on clips
made on the fly, then changes its attention and trains on, and writes one page with the results."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from ...suggest import Parser
from .. import Attention
from .arms import ARMS, make_arm
from .clips import clips
from .model import Size
from .page import seen_by, verdict, write_page
from .train import Plan, measure, predict, start, train


def main(arguments=None):
    parser = Parser(prog="python -m sagebwd.sla2.demo", description=__doc__, allow_abbrev=False)
    number = lambda name, value, words: parser.add_argument(
        f"--{name}", type=type(value), default=value, help=f"{words} (default {value})"
    )
    parser.add_argument("--out", type=Path, default=Path("build/sla2"))
    parser.add_argument(
        "--start", type=Path, help="file of the full-attention model; trained if not there"
    )
    parser.add_argument("--arms", default="full,sparse,sla2", help=f"of {','.join(ARMS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--recipe", choices=("vectorwise", "paper", "exact"), default="vectorwise")
    number("keep", 0.1, "share of key blocks that a block of queries sees")
    number("steps", 400, "training with full attention")
    number("tune", 80, "training with each kind of attention")
    number("fit", 40, "steps of stage 1 for each layer")
    number("batch", 1, "clips of a step")
    number("lr", 3e-3, "learning rate; a fifth of it after the change")
    number("seed", 0, "of weights and clips")
    number("measured", 8, "held-out clips")
    size = Size()
    for name in ("frames", "pixels", "patch", "layers", "heads"):
        number(name, getattr(size, name), "of the model")
    number("block", 64, "queries of a block: 64 or 128")
    args = parser.parse_args(arguments)
    arms = args.arms.split(",")
    unknown = [name for name in arms if name not in ARMS]
    if unknown:
        parser.error(f"--arms: expected some of {', '.join(ARMS)}, got {', '.join(unknown)}")
    size = replace(
        size,
        block_q=args.block,
        **{n: getattr(args, n) for n in ("frames", "pixels", "patch", "layers", "heads")},
    )
    run(args, size, arms)
    return 0


def run(args, size, arms):
    began = time.perf_counter()
    say = lambda words: print(f"[{time.perf_counter() - began:6.1f} s] {words}", flush=True)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else None
    recipe = _exact() if args.recipe == "exact" else args.recipe
    plan = Plan(args.steps, args.batch, args.lr, 0.0, args.seed, dtype)
    say(f"{size.tokens} tokens, {args.steps} steps with full attention")
    model = start(size, plan, args.device, args.start)
    tune = replace(plan, steps=args.tune, lr=args.lr / 5, alpha_lr=2 * args.lr, seed=args.seed + 1)
    batches = [tune.inputs(size, 10**6 + i, args.device) for i in range(4)]
    batches = [(x, at) for x, _, at in batches]
    score = lambda m: measure(m, args.measured, args.batch, dtype)
    record = {"arms": {}, "stage_1": {}, "keep": args.keep, "tokens": size.tokens}
    generator = torch.Generator().manual_seed(7)
    clip = clips(1, size.frames, size.pixels, generator, device=args.device)
    guess = lambda m: predict(m, clip, torch.Generator().manual_seed(8), dtype)
    pictures = {"clips": {"the clip": clip[0]}, "masks": {}, "view": clip[0]}
    for name in arms:
        arm, table = make_arm(name, model, args.keep, batches, args.fit, recipe)
        for layer in table or ():
            mean = lambda x: sum(x) / len(x)
            record["stage_1"][f"{name}: {layer.name}"] = [
                mean(layer.identity), mean(layer.error), mean(layer.softness)
            ]  # fmt: skip
        before = score(arm)
        losses, seconds = train(arm, tune)
        after = score(arm)
        record["arms"][name] = dict(before=before, after=after, losses=losses, step_seconds=seconds)
        say(
            f"{name:9} loss {before['loss']:.4f} → {after['loss']:.4f}, "
            f"PSNR {before['psnr']:.2f} → {after['psnr']:.2f}, {seconds:.3f} s a step"
        )
        frames, _, noise = guess(arm)
        pictures["clips"].setdefault("with noise, as the models get it", noise[0])
        pictures["clips"][f"{name}: {ARMS[name]}"] = frames[0]
        if name == arms[-1]:
            _look(arm, clip, lambda: guess(arm), pictures)
    record["about"] = (
        f"Image-to-video flow matching on clips made on the fly: {size.tokens} tokens, blocks of "
        f"{size.block_q} × {size.block_k}, {100 * args.keep:g} % of them seen."
    )
    record["plan"] = (
        f"{args.steps} steps with full attention; from there, {args.tune} steps with each kind of "
        "attention, on the same clips. Loss of held-out clips at fixed times and noise; PSNR in dB."
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sla2.json").write_text(json.dumps(record, indent=1) + "\n")
    write_page(record, pictures, args.out / "sla2.html")
    say(verdict(record["arms"]).replace("`", ""))
    print(f"The page with all of this is {args.out / 'sla2.html'}.")


def _exact():
    from ...recipe import MATMULS, Recipe

    return Recipe(high_precision=tuple(MATMULS))


@torch.no_grad()
def _look(model, clip, forward, pictures):
    """Pictures of the blocks that the router chooses for a clip."""
    found, handles = [], []
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.keep < 1:
            take = lambda m, args, name=name: found.append(
                (name, m.router.lists(*args[:2], m.keep))
            )
            handles.append(module.register_forward_pre_hook(take))
    forward()
    for handle in handles:
        handle.remove()
    for name, lists in found:
        if lists is None:
            continue
        for head, mask in enumerate(lists.to_mask()[0]):
            pictures["masks"][f"{name.removesuffix('.attend')}, head {head}"] = mask
            query = mask.shape[0] * 5 // 8
            pictures["view"] = seen_by(model, mask, clip[0], query)


if __name__ == "__main__":
    sys.exit(main())
