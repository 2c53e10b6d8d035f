# SPDX-License-Identifier: Apache-2.0
"""Training and measuring of the demo's model. All arms see the same clips, times and noise."""

import math
import os
import time
from dataclasses import dataclass

import torch

from .clips import clips
from .model import Model

_HELD_OUT = 10**9  # seeds of clips that no training sees
_SAVE_EVERY = 60  # seconds


class OutOfTime(Exception):
    """The time is up; what was done is saved."""


def seeded(device, seed):
    """Numbers are drawn on the device that needs them."""
    return torch.Generator(device).manual_seed(seed)


def noisy(video, at, given, generator):
    """(input, target): x_t = (1 - t)·x + t·noise with velocity noise - x; given frames stay."""
    noise = torch.randn(video.shape, generator=generator, device=video.device)
    t = at[:, None, None, None, None]
    mixed = (1 - t) * video + t * noise
    mixed[:, :, :given] = video[:, :, :given]
    return mixed, noise - video


@dataclass(frozen=True)
class Plan:
    steps: int
    batch: int
    lr: float
    alpha_lr: float = 0.0
    seed: int = 0
    dtype: torch.dtype | None = None  # autocast

    def inputs(self, size, step, device):
        generator = seeded(device, self.seed * 1_000_003 + step)
        video = clips(self.batch, size.frames, size.pixels, generator, cells=size.cells)
        at = torch.rand(self.batch, generator=generator, device=device)
        return (*noisy(video, at, size.given, generator), at)

    def lr_share(self, step):
        """Of the learning rate: a short rise, then half a cosine down to a tenth."""
        rise = min(1, (step + 1) / max(1, self.steps // 20))
        return rise * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


def autocast(device, dtype):
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None)


def loss_of(model, x, target, at, dtype=None):
    with autocast(x.device, dtype):
        got = model(x, at)
    given = model.size.given
    return (got.float() - target)[:, :, given:].square().mean()


def train(model, plan, file=None, until=math.inf):
    """Returns (losses, seconds per step). ``file``: where the training stands is saved there every
    minute and when ``until`` (of time.monotonic) has come, and a later call goes on from it."""
    device = next(model.parameters()).device
    alpha = [p for n, p in model.named_parameters() if ".alpha." in n and p.requires_grad]
    rest = [p for n, p in model.named_parameters() if ".alpha." not in n and p.requires_grad]
    groups = [{"params": rest, "lr": plan.lr}, {"params": alpha, "lr": plan.alpha_lr}]
    groups = [g for g in groups if g["params"]]
    rates = [g["lr"] for g in groups]
    adam = torch.optim.AdamW(groups, weight_decay=0.01)
    losses = []
    if file is not None and file.exists():
        state = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        losses = state["losses"]
    first = len(losses)
    warm = first + min(5, (plan.steps - first) // 2)  # steps that are not timed
    saved = began = time.monotonic()
    for step in range(first, plan.steps):
        if step == warm:
            began = _now(device)
        for group, rate in zip(adam.param_groups, rates):
            group["lr"] = rate * plan.lr_share(step)
        loss = loss_of(model, *plan.inputs(model.size, step, device), plan.dtype)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(loss.detach())
        if file is not None and step % 10 == 9:
            now = _now(device)
            if now > min(until, saved + _SAVE_EVERY):
                losses = [float(x) for x in losses]
                state = {"model": model.state_dict(), "adam": adam.state_dict(), "losses": losses}
                save(state, file)
                saved = now
            if now > until:
                raise OutOfTime(f"step {step + 1} of {plan.steps} with full attention")
    seconds = (_now(device) - began) / max(1, plan.steps - warm)
    return [float(x) for x in losses], seconds


def _now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def save(value, file):
    """A file that is there as a whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    torch.save(value, part)
    os.replace(part, file)


@torch.no_grad()
def measure(model, count, batch, dtype=None):
    """Held-out loss at fixed times and noise, and the PSNR of frames predicted at t = 0.4."""
    device = next(model.parameters()).device
    size, losses, errors = model.size, [], []
    for i in range(count):
        generator = seeded(device, _HELD_OUT + i)
        video = clips(batch, size.frames, size.pixels, generator, cells=size.cells)
        at = ((torch.arange(batch) + 0.5 + i * batch) / (count * batch)).to(device)
        losses.append(float(loss_of(model, *noisy(video, at, size.given, generator), at, dtype)))
        errors.append(float(predict(model, video, generator, dtype)[1]))
    mean = sum(errors) / count
    return {"loss": sum(losses) / count, "psnr": 10 * math.log10(4 / mean)}


@torch.no_grad()
def predict(model, video, generator, dtype=None, at=0.4):
    """(predicted frames, mean squared error, the frames as the model gets them)."""
    given = model.size.given
    at = torch.full((video.shape[0],), at, device=video.device)
    x, _ = noisy(video, at, given, generator)
    with autocast(x.device, dtype):
        velocity = model(x, at).float()
    guess = x - at[:, None, None, None, None] * velocity
    guess[:, :, :given] = video[:, :, :given]
    return guess, (guess - video)[:, :, given:].square().mean(), x


def start(size, plan, device, file, until=math.inf):
    """A model trained with full attention, or the one that an earlier call left in the file."""
    torch.manual_seed(plan.seed)
    model = Model(size).to(device)
    if file.exists():
        model.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        return model
    unfinished = file.with_name("unfinished.pt")
    train(model, plan, unfinished, until)
    save(model.state_dict(), file)
    unfinished.unlink(missing_ok=True)
    return model
