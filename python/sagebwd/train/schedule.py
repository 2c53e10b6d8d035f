# SPDX-License-Identifier: Apache-2.0
"""Learning rate by step, and AdamW with decay on matrices only."""

import math

import torch


def learning_rate(config, step):
    """Of the step with this index: linear warm-up to the peak, then a cosine down to its last
    share."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    rest = max(1, config.steps - config.warmup)
    progress = min(1.0, (step - config.warmup) / rest)
    low = config.lr * config.min_lr
    return low + 0.5 * (config.lr - low) * (1 + math.cos(math.pi * progress))


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
