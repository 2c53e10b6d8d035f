# SPDX-License-Identifier: Apache-2.0
"""Training and measuring of the demo's model. All arms see the same clips, times and noise."""

import math
import time
from dataclasses import dataclass

import torch

from .clips import clips
from .model import Model

_HELD_OUT = 10**9  # seeds of clips that no training sees


def noisy(video, at, given, generator):
    """(input, target): x_t = (1 - t)·x + t·noise with velocity noise - x; given frames stay."""
    noise = torch.randn(video.shape, generator=generator).to(video.device)
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
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        video = clips(self.batch, size.frames, size.pixels, generator, device=device)
        at = torch.rand(self.batch, generator=generator).to(device)
        return (*noisy(video, at, size.given, generator), at)


def loss_of(model, x, target, at, dtype=None):
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
        got = model(x, at)
    given = model.size.given
    return (got.float() - target)[:, :, given:].square().mean()


def train(model, plan):
    """Returns (losses, seconds per step)."""
    device = next(model.parameters()).device
    alpha = [p for n, p in model.named_parameters() if "alpha" in n and p.requires_grad]
    rest = [p for n, p in model.named_parameters() if "alpha" not in n and p.requires_grad]
    groups = [{"params": rest, "lr": plan.lr}, {"params": alpha, "lr": plan.alpha_lr}]
    adam = torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=0.01)
    warm = max(1, plan.steps // 20)
    shape = lambda s: min(1, (s + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * s / plan.steps))
    decay = torch.optim.lr_scheduler.LambdaLR(adam, shape)
    losses, began = [], time.perf_counter()
    for step in range(plan.steps):
        loss = loss_of(model, *plan.inputs(model.size, step, device), plan.dtype)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        decay.step()
        losses.append(loss.detach())
    losses = [float(x) for x in losses]
    return losses, (time.perf_counter() - began) / plan.steps


@torch.no_grad()
def measure(model, count, batch, dtype=None):
    """Held-out loss at fixed times and noise, and the PSNR of frames predicted at t = 0.4."""
    device = next(model.parameters()).device
    size, losses, errors = model.size, [], []
    for i in range(count):
        generator = torch.Generator().manual_seed(_HELD_OUT + i)
        video = clips(batch, size.frames, size.pixels, generator, device=device)
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
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
        velocity = model(x, at).float()
    guess = x - at[:, None, None, None, None] * velocity
    guess[:, :, :given] = video[:, :, :given]
    return guess, (guess - video)[:, :, given:].square().mean(), x


def start(size, plan, device, file=None):
    """A model trained with full attention, or the one that an earlier call left in the file."""
    torch.manual_seed(plan.seed)
    model = Model(size).to(device)
    if file is not None and file.exists():
        model.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        return model
    train(model, plan)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    return model
