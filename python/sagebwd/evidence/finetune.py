# SPDX-License-Identifier: Apache-2.0
"""Short fine-tuning with every kind of attention: the same start, the same batches in the same
order, several seeds of that order, and the loss on held-out text before and after."""

import copy
import math
import statistics
import time
from dataclasses import dataclass

import torch

from .arms import SIXTEEN
from .model import loss_of


@dataclass
class Plan:
    steps: int
    batch: int  # sequences of a step
    context: int
    eval_tokens: int
    lr: float = 5e-5

    def rate(self, step):
        """A tenth of the steps to warm up, then a cosine down to a tenth."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.lr * (step + 1) / warm
        rest = (step - warm) / max(1, self.steps - warm)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * rest))


class FineTuning:
    """Runs one after the other from the weights that the model has at the beginning."""

    def __init__(self, model, text, plan, say=print):
        self.model, self.text, self.plan, self.say = model, text, plan, say
        self.device = next(model.parameters()).device
        self.start = copy.deepcopy(model.state_dict())
        self.held_out = text.evaluation(plan.eval_tokens, plan.context, self.device)
        self.before = {}  # {arm: held-out loss}: the same for all seeds

    def run(self, arm, implementation, seed):
        """{"arm", "seed", "before", "after", "losses", "seconds"}"""
        began, plan = time.perf_counter(), self.plan
        self.model.load_state_dict(self.start)
        self.model.set_attn_implementation(implementation)
        if arm not in self.before:
            self.before[arm] = self._evaluate()
        batches = self.text.batches(plan.context, seed, self.device)
        optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        losses = []
        self.model.train()
        for step in range(plan.steps):
            for group in optimizer.param_groups:
                group["lr"] = plan.rate(step)
            optimizer.zero_grad(set_to_none=True)
            with self._autocast():
                loss = loss_of(self.model, batches.rows(step * plan.batch, plan.batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        self.model.eval()
        result = {
            "arm": arm,
            "seed": seed,
            "before": self.before[arm],
            "after": self._evaluate(),
            "losses": torch.stack(losses).tolist(),
            "seconds": time.perf_counter() - began,
        }
        self.say(
            f"  seed {seed}, {arm:12} held-out loss {result['before']:.4f} → "
            f"{result['after']:.4f}, {result['seconds']:.0f} s"
        )
        return result

    def restore(self):
        self.model.load_state_dict(self.start)

    def _autocast(self):
        """What is around attention: 16-bit products on a GPU, as one trains there."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    @torch.no_grad()
    def _evaluate(self):
        losses = []
        for rows in self.held_out.split(self.plan.batch):
            with self._autocast():
                losses.append(loss_of(self.model, rows).item() * len(rows))
        return sum(losses) / len(self.held_out)


def summary(runs):
    """{arm: {"before", "after": mean over seeds, "scatter": standard deviation over seeds,
    "difference": [after minus that of 16-bit attention, per seed], "difference_mean",
    "difference_scatter"}}. Only seeds that both arms have are compared."""
    base = {run["seed"]: run["after"] for run in runs if run["arm"] == SIXTEEN}
    result = {}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        mine = [run for run in runs if run["arm"] == arm]
        gaps = [run["after"] - base[run["seed"]] for run in mine if run["seed"] in base]
        after = [run["after"] for run in mine]
        result[arm] = {
            "before": mine[0]["before"],
            "after": statistics.fmean(after),
            "scatter": _scatter(after),
            "difference": gaps,
            "difference_mean": statistics.fmean(gaps) if gaps else None,
            "difference_scatter": _scatter(gaps),
        }
    return result


def _scatter(values):
    if not all(map(math.isfinite, values)):
        return math.nan  # the function would raise
    return statistics.stdev(values) if len(values) > 1 else None


def verdict(found):
    """Whether each arm's mean difference to 16-bit attention is within the scatter of its seeds."""
    bar = found.get(SIXTEEN, {}).get("scatter")
    if bar is None:
        return "Nothing to compare with: that takes 16-bit attention with two seeds or more."
    parts = []
    for arm, s in found.items():
        if arm == SIXTEEN or s["difference_mean"] is None:
            continue
        inside = abs(s["difference_mean"]) <= bar  # False for NaN
        parts.append(
            f"`{arm}` {s['difference_mean']:+.4f} "
            f"({'within' if inside else 'beyond'} the scatter of seeds)"
        )
    listed = "; ".join(parts)
    return f"Held-out loss against `{SIXTEEN}`, whose seeds scatter by {bar:.4f}: {listed}."
