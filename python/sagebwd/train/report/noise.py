# SPDX-License-Identifier: Apache-2.0
"""What a difference between two runs has to exceed before it means anything.

A *repeat* is a full-precision run that differs from the reference only in its seeds or by rounding.
How far repeats end apart is chance, so comparing single runs cannot resolve a smaller difference.
Runs that share start and data can be compared more closely, step by step on the same batch; that
difference has its own error bar.
"""

import math
import statistics
from dataclasses import dataclass

from ..config import NUMERIC
from .runs import REFERENCE, reference_of

#: A difference in held-out loss that counts as none whatever the repeats say.
LEAST = 0.005
_SEEDS = {"seed", "data_seed"}
_BLOCKS, _STUDENT = 5, 2.78  # 95 % of Student's distribution with four degrees of freedom


@dataclass
class Noise:
    loss: float  # differences in held-out loss up to this are noise
    apart: float = None  # root mean square distance of repeats, second half of training
    speed: float = None  # largest relative difference in speed of runs that do the same work


def differing(a, b):
    """Fields in which two configurations differ. Numbers that agree to four digits differ by no
    more than rounding does."""
    same = lambda x, y: math.isclose(x, y, rel_tol=1e-4) if isinstance(x, float) else x == y
    return {n for n in NUMERIC if not same(a.config.get(n), b.config.get(n))}


def repeats_of(runs):
    base = reference_of(runs)
    full = [r for r in runs if r.config["attention"] == REFERENCE and r is not base]
    return [r for r in full if differing(base, r) <= _SEEDS]


def compared_with(runs):
    """Runs that are compared with the reference: neither it nor its repeats."""
    apart = [reference_of(runs), *repeats_of(runs)]
    return [r for r in runs if all(r is not a for a in apart)]


def noise_of(runs):
    base, repeats = reference_of(runs), repeats_of(runs)
    if not repeats:
        return Noise(LEAST)
    apart = math.sqrt(statistics.fmean(d * d for r in repeats for d in late_evals(r, base)))
    work = lambda r: r.config.get("micro_batch")
    ratios = [r.speed / base.speed for r in repeats if work(r) == work(base)]
    speed = max((abs(r - 1) for r in ratios), default=None)
    return Noise(max(LEAST, apart), apart, speed)


def differences(run, base, kind="step"):
    """[(step, loss of ``run`` minus loss of ``base``)] where both have one."""
    want = dict(base.curve(kind=kind))
    both = [(x, y - want[x]) for x, y in run.curve(kind=kind) if x in want]
    return [(x, d) for x, d in both if math.isfinite(d)]


def late_evals(run, base):
    """Held-out differences of the second half of training."""
    all_ = differences(run, base, "eval")
    last = max((x for x, _ in all_), default=0)
    return [d for x, d in all_ if 2 * x > last] or [run.eval_loss - base.eval_loss]


def late_mean(run, base):
    """(mean, error bar) of the difference in training loss over the second half of the steps, on
    the same batches. The bar is a 95 % interval from the means of five blocks of steps, because
    neighbouring steps are not independent. None if there are too few steps."""
    late = [d for _, d in differences(run, base)]
    late = late[len(late) // 2 :]
    size = len(late) // _BLOCKS
    if size < 2:
        return None
    late = late[-_BLOCKS * size :]
    means = [statistics.fmean(late[i : i + size]) for i in range(0, len(late), size)]
    return statistics.fmean(late), _STUDENT * statistics.stdev(means) / math.sqrt(_BLOCKS)


def running_mean(points, share=0.16):
    """[(x, mean, standard error)] over a window around each point."""
    half = max(2, round(share * len(points) / 2))
    out = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1]]
        error = statistics.stdev(near) / math.sqrt(len(near)) if len(near) > 1 else 0.0
        out.append((x, statistics.fmean(near), error))
    return out


def speed_bar(run, base, noise):
    """Uncertainty of run.speed / base.speed: two standard errors of the median of the step-by-step
    ratios, and at least what runs that do the same work differ by."""
    speed = lambda r: {e["step"]: e["tokens_per_second"] for e in r.of("step")}
    mine, theirs = speed(run), speed(base)
    ratios = [mine[s] / theirs[s] for s in sorted(mine)[2:] if theirs.get(s)]
    error = 0.0
    if len(ratios) > 3:
        middle = statistics.median(ratios)
        deviation = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
        error = 2 * 1.2533 * deviation / math.sqrt(len(ratios))
    return max(error, noise.speed or 0.0)
