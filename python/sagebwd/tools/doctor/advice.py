# SPDX-License-Identifier: Apache-2.0
"""What to do with the findings, in sentences."""

import math
from collections import Counter

from ..diagnosis import FINE, USABLE

#: A remedy of sagebwd.diagnose as a user writes it.
_WRITTEN = {
    "S in floating point": '`Recipe(high_precision=("S", "S\'"))`',
    "P·V in floating point": '`Recipe(high_precision=("O",))`',
    'backward="bf16"': '`backward="bf16"`',
}
_FEW = 0.25  # a share of the layers that may stay in floating point


def advise(library, examined, whole, timed):
    """Sentences, the most important first."""
    if not whole.calls:
        return ["INT8 attention cannot run in this model; the reasons are in the tables."]
    compared = [e for e in examined if e.report.errors]
    out = [_recipe(library, examined, compared, whole), f"Switch it on: `{whole.switch}`"]
    leaks = [e.leak for e in compared if not math.isnan(e.leak)]
    if leaks and max(leaks) > 0:
        out.append(
            f"Later tokens change earlier results by up to {max(leaks):.2%}, as this recipe shares "
            "scales between tokens; sampled and re-scored probabilities differ by that. In the "
            "default recipe they change no bit (docs/causality.md)."
        )
    if whole.elsewhere:
        count = sum(whole.elsewhere.values())
        out.append(
            f"{count} of {count + whole.calls} calls cannot run in INT8 and keep PyTorch's "
            "attention, by `fallback`."
        )
    if slow := [str(t.tokens) for t in timed if t.ratio < 1]:
        out.append(
            f"Not faster than PyTorch's attention on this machine at {', '.join(slow)} tokens."
        )
    return out


def _recipe(library, examined, compared, whole):
    if not compared:
        return (
            "No call could be compared by itself; the gradients of all weights are off by "
            f"{whole.error:.2%} with the default recipe."
        )
    bad = [e for e in compared if not e.worst <= FINE]
    if not bad:
        return f"The default recipe: no call has an error above {FINE:.0%}."
    sensitive = [e for e in bad if not e.worst <= USABLE]
    numbers = {number_of(e.module) for e in sensitive}
    few = len(sensitive) <= _FEW * len(examined)
    if sensitive and few and library == "transformers" and None not in numbers:
        return (
            f"The default recipe, with {len(numbers)} sensitive layers in floating point: "
            f"`register(exact_layers={sorted(numbers)})`."
        )
    remedy = Counter(e.report.remedy for e in bad).most_common(1)[0][0]
    if not remedy:
        return f"{len(bad)} of {len(compared)} calls are not finite: check the checkpoint."
    return (
        f"{len(bad)} of {len(compared)} calls have errors above {FINE:.0%}, {len(sensitive)} of "
        f"them above {USABLE:.0%}. What helps most: {_WRITTEN.get(remedy, remedy)}."
    )


def number_of(module):
    """The layer that a module's name gives: its last number."""
    numbers = [int(part) for part in module.split(".") if part.isdigit()]
    return numbers[-1] if numbers else None
