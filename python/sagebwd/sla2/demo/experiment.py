# SPDX-License-Identifier: Apache-2.0
"""The arms of an experiment, one at a time: what is finished is kept in a folder, so that an
experiment that was stopped goes on where it was."""

import json
import math
import shutil
import time
from dataclasses import dataclass, replace

import torch

from ...train.files import write_text
from .. import Attention
from .arms import FITTED, fit_arm, fitted_state, make_arm
from .clips import clips
from .pictures import some_frames
from .train import OutOfTime, Plan, autocast, measure, predict, save, seeded, start, train

_FIRST_ARM = 60  # seconds that an arm may take if none was timed yet


@dataclass(frozen=True)
class Arm:
    kind: str
    keep: float
    seed: int

    def __str__(self):
        return f"{self.kind}_keep{self.keep:g}_seed{self.seed}"


def arms_of(kinds, keeps, seeds):
    """Seed by seed, so that what is there when the time is up can be compared. Full attention sees
    everything, so it is there once for each seed."""
    arms = []
    for seed in seeds:
        arms += [Arm("full", 1, seed) for kind in kinds if kind == "full"]
        arms += [Arm(kind, keep, seed) for keep in keeps for kind in kinds if kind != "full"]
    return arms


class Folder:
    """Finished arms: a JSON file with the figures of each, and one with its tensors."""

    def __init__(self, path, settings, resume):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        file = path / "settings.json"
        if resume and file.exists():
            before = json.loads(file.read_text())
            other = [n for n in settings | before if settings.get(n) != before.get(n)]
            if other:
                raise ValueError(
                    f"{path}: was begun with another {', '.join(other)}; give another folder, or "
                    "leave --resume out to begin anew"
                )
        else:
            shutil.rmtree(path / "arms", ignore_errors=True)
            for name in ("start.pt", "unfinished.pt"):
                (path / name).unlink(missing_ok=True)
        (path / "arms").mkdir(exist_ok=True)
        write_text(file, json.dumps(settings, indent=1) + "\n")

    def _file(self, arm, ending):
        return self.path / "arms" / f"{arm}.{ending}"

    def figures(self, arm):
        """None if the arm is not finished."""
        file = self._file(arm, "json")
        return json.loads(file.read_text()) if file.exists() else None

    def tensors(self, arm):
        file = self._file(arm, "pt")
        return torch.load(file, weights_only=True) if file.exists() else {}

    def keep(self, arm, figures, tensors):
        save(tensors, self._file(arm, "pt"))
        write_text(self._file(arm, "json"), json.dumps(figures) + "\n")  # last: it is finished


class Experiment:
    """One model trained with full attention; from there each arm goes on, on the same clips."""

    def __init__(self, args, size, folder, say):
        self.args, self.size, self.folder, self.say = args, size, folder, say
        self.dtype = torch.bfloat16 if args.dtype == "bfloat16" else None
        self.plan = Plan(args.steps, args.batch, args.lr, dtype=self.dtype)

    def run(self, arms, until=math.inf):
        """Trains what is not finished. OutOfTime if that is more than there is time for."""
        todo = [arm for arm in arms if self.folder.figures(arm) is None]
        if not todo:
            return
        file = self.folder.path / "start.pt"
        if not file.exists():
            self.say(f"{self.size.tokens} tokens, {self.args.steps} steps with full attention")
        model = start(self.size, self.plan, self.args.device, file, until)
        times = [done["seconds"] for done in map(self.folder.figures, arms) if done]
        for arm in todo:
            longest = max(times, default=_FIRST_ARM)
            if time.monotonic() + longest > until:
                raise OutOfTime(f"no arm begins with less than {longest:.0f} s left")
            figures, tensors = self._run(arm, model)
            self.folder.keep(arm, figures, tensors)
            times.append(figures["seconds"])
            before, after = figures["before"], figures["after"]
            self.say(
                f"{arm!s:26} loss {before['loss']:.4f} → {after['loss']:.4f}, PSNR "
                f"{before['psnr']:.2f} → {after['psnr']:.2f}, {figures['step_seconds']:.3f} s a "
                f"step, {figures['seconds']:.0f} s in all"
            )

    def _run(self, arm, start):
        args, began = self.args, time.monotonic()
        recipe = _exact() if args.recipe == "exact" else args.recipe
        model = make_arm(arm.kind, start, arm.keep, recipe)
        tune = replace(
            self.plan, steps=args.tune, lr=args.lr / 5, alpha_lr=2 * args.lr, seed=arm.seed + 1
        )
        stage_1, fitted = {}, None
        if arm.kind in FITTED:
            # INT8 and 16-bit arms have one router, so that nothing else differs.
            twin = replace(arm, kind="sla2")
            fitted = self.folder.tensors(twin).get("fitted") if arm.kind == "sla2-16bit" else None
            if fitted is None:
                stage_1 = self._stage_1(arm, model, tune)
                fitted = fitted_state(model)
            else:
                model.load_state_dict(fitted, strict=False)
        before = self._score(model)
        losses, seconds = train(model, tune)
        figures = dict(
            arm=arm.kind,
            keep=arm.keep,
            seed=arm.seed,
            before=before,
            after=self._score(model),
            losses=losses,
            step_seconds=seconds,
            stage_1=stage_1,
        )
        tensors = {} if fitted is None else {"fitted": fitted}
        if arm.seed == args.seed[0]:
            tensors |= self._pictures(model)
        return figures | {"seconds": time.monotonic() - began}, tensors

    def _stage_1(self, arm, model, tune):
        """{layer: [error with Wq = Wk = 1, error, softness]}, means over heads."""
        args = self.args
        some = replace(tune, batch=min(tune.batch, 4))
        batches = [some.inputs(self.size, 10**6 + i, args.device) for i in range(4)]
        mean = lambda x: sum(x) / len(x)
        with autocast(args.device, self.dtype):
            table = fit_arm(arm.kind, model, [(x, at) for x, _, at in batches], args.fit, arm.seed)
        return {
            layer.name: [mean(layer.identity), mean(layer.error), mean(layer.softness)]
            for layer in table
        }

    def _score(self, model):
        return measure(model, self.args.measured, self.args.batch, self.dtype)

    def _pictures(self, model):
        """What a page shows of an arm: noisy frames of a clip, those predicted, and the blocks that
        each head chose: masks [rows, key blocks]."""
        clip = shown_clip(self.size, self.args.device)
        masks, handles = {}, []
        for name, module in model.named_modules():
            if isinstance(module, Attention) and module.keep < 1:
                handles.append(module.register_forward_pre_hook(_look(masks, name)))
        frames, _, noise = predict(model, clip, seeded(self.args.device, 8), self.dtype)
        for handle in handles:
            handle.remove()
        video = lambda x: some_frames(x[0]).to("cpu", torch.float16)
        return {"noisy": video(noise), "frames": video(frames), "masks": masks}


def shown_clip(size, device):
    """The clip of the page, [1, 3, frames, pixels, pixels]."""
    return clips(1, size.frames, size.pixels, seeded(device, 7), cells=size.cells)


def _look(masks, name):
    def look(module, args):
        with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
            lists = module.router.lists(*args[:2], module.keep)
        for head, mask in enumerate([] if lists is None else lists.to_mask()[0].cpu()):
            masks[f"{name.removesuffix('.attend')}, head {head}"] = mask

    return look


def _exact():
    from ...recipe import MATMULS, Recipe

    return Recipe(high_precision=tuple(MATMULS))
