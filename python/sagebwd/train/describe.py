# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself: when it begins, and when it is done."""

import statistics

import torch

from .. import wait_policy
from .machine import describe_machine
from .schedule import describe_schedule


def introduction(trainer):
    c, plan, world = trainer.config, trainer.plan, trainer.world
    count = sum(p.numel() for p in trainer.model.parameters())
    rate, why = trainer.peak()
    each = f" on each of {world.readers} readers" if world.readers > 1 else ""
    lines = [
        f"model    {count / 1e6:.1f}M parameters: {c.layers} layers, width {c.width}, "
        f"{c.heads} heads of {c.head_dim}, context {c.context}{', QK-norm' if c.qk_norm else ''}",
        f"attends  {c.describe_attention()}",
        f"data     {trainer.source.words}",
        f"batch    {c.tokens_per_step} tokens a step: {plan.accumulate} x {plan.micro} sequences"
        + each,
        f"learns   {describe_schedule(c)}",
        f"device   {describe_machine(trainer.device)}, {str(trainer.dtype)[6:]}; "
        + (f"MFU of the {why}" if rate else f"no MFU, {why}"),
        f"writes   {c.out}"
        + (f"; goes on after step {trainer.step_count}" if trainer.step_count else ""),
    ]
    spinning = wait_policy.note(torch.get_num_threads()) if trainer.device.type == "cpu" else ""
    if spinning:
        lines.append(f"threads  {spinning}")
    if c.init and not trainer.step_count:
        lines.append(f"weights  of {c.init}")
    return "\n".join(lines)


def summary(trainer):
    # The first steps compile, allocate and warm caches up.
    speeds = trainer.speeds[2:] or trainer.speeds or [0.0]
    device = trainer.device
    return {
        "attention": trainer.config.describe_attention(),
        "steps": trainer.step_count,
        "tokens": trainer.step_count * trainer.config.tokens_per_step,
        "loss": trainer.last.get("loss"),
        "eval_loss": trainer.last.get("eval_loss"),
        "seconds": trainer.seconds,
        "tokens_per_second": statistics.median(speeds),
        "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "activation_bytes": activation_bytes(trainer),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "data": trainer.source.fingerprint,
        "machine": describe_machine(device),
        "torch": torch.__version__,
    }


def activation_bytes(trainer):
    """What the forward of one sequence keeps for its backward, weights not counted. None where
    ranks share the weights or the sequence."""
    if trainer.world.size > 1:
        return None
    kept = {}

    def note(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    tokens, targets = trainer.pair(trainer.held_out_rows(1))
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
        trainer.autocast(),
    ):
        trainer.model(tokens, targets)
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    return sum(size for at, size in kept.items() if at not in weights)
