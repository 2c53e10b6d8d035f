# SPDX-License-Identifier: Apache-2.0
"""Learning rate by step, and AdamW with decay on matrices only."""

import math
from dataclasses import replace

import torch


def learning_rate(config, step):
    """The learning rate of the step with this index: linear warm-up to the peak, then a cosine down
    to the last share of it."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    rest = max(1, config.steps - config.warmup)
    progress = min(1.0, (step - config.warmup) / rest)
    low = config.lr * config.min_lr
    return low + 0.5 * (config.lr - low) * (1 + math.cos(math.pi * progress))


def describe_schedule(config):
    """``10 steps up to 3.00e-03, then a cosine to 3.00e-04 at step 100``"""
    warm = f"{config.warmup} steps up to" if config.warmup else "from"
    low = config.lr * config.min_lr
    return f"{warm} {config.lr:.2e}, then a cosine to {low:.2e} at step {config.steps}"


def describe_change(config, step, steps_before):
    """What another number of steps does to the learning rate from ``step`` on."""
    before = replace(config, steps=steps_before)
    return (
        f"{config.steps} steps instead of {steps_before}: the cosine is another one, and step "
        f"{step + 1} takes {learning_rate(config, step):.2e} "
        f"(the shorter or longer run had {learning_rate(before, step):.2e} there)"
    )


def make_optimizer(config, model):
    on_gpu = next(model.parameters()).is_cuda
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=on_gpu,
        foreach=not on_gpu,
    )


def set_learning_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate
