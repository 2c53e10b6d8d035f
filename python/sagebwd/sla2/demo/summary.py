# SPDX-License-Identifier: Apache-2.0
"""What the arms of an experiment say together: means and deviations over seeds, and what they have
to show. `python -m sagebwd.sla2.demo.summary sla2.json` prints both."""

import json
import statistics
import sys
from pathlib import Path

FIGURES = ("loss before", "loss after", "PSNR before", "PSNR after", "step, ms")

#: From the largest loss to the smallest.
ORDER = ("sparse", "v1", "identity", "sla2")

#: How much of what sparse attention loses sla2 has to win back, before and after training.
WON_BACK = {"before": 0.40, "after": 0.15}


def summary(runs):
    """{share of blocks: {arm: {figure: [mean, deviation over seeds]}}}. Full attention stands with
    every share."""
    keeps = sorted({f"{run['keep']:g}" for run in runs if run["arm"] != "full"}, reverse=True)
    found = {}
    for keep in keeps or ["1"]:
        arms = found.setdefault(keep, {})
        for run in runs:
            if run["arm"] != "full" and f"{run['keep']:g}" != keep:
                continue
            values = (
                *(run[when]["loss"] for when in ("before", "after")),
                *(run[when]["psnr"] for when in ("before", "after")),
                1e3 * run["step_seconds"],
            )
            figures = arms.setdefault(run["arm"], {name: [] for name in FIGURES})
            for name, value in zip(FIGURES, values):
                figures[name].append(value)
        for figures in arms.values():
            figures.update({name: spread(values) for name, values in figures.items()})
    return found


def spread(values):
    """[mean, standard deviation]"""
    return [statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def won_back(arms, when):
    """The share of what sparse attention loses against full attention that sla2 wins back, or None
    if sparse attention loses nothing. Full attention counts as it is after training."""
    loss = lambda arm, when: arms[arm][f"loss {when}"][0]
    gap = loss("sparse", when) - loss("full", "after")
    return 1 - (loss("sla2", when) - loss("full", "after")) / gap if gap > 0 else None


def checks(runs):
    """What an experiment with several seeds has to show: dicts with `keep`, `what`, `passed`. The
    scatter of two arms is the larger of their standard deviations over seeds. One seed has none,
    and shows nothing."""
    found = []
    if len({run["seed"] for run in runs}) < 2:
        return found
    for keep, arms in summary(runs).items():
        say = lambda what, passed, keep=keep: found.append(
            {"keep": keep, "what": what, "passed": passed}
        )
        order = [arm for arm in ORDER if arm in arms]
        for worse, better in zip(order, order[1:]):
            gap, scatter = _gap(arms[worse], arms[better])
            words = f"`{better}` ends below `{worse}` by {gap:.4f}, the scatter is {scatter:.4f}"
            each = " ".join(f"{x:.4f}" for x in _gaps(runs, keep, worse, better))
            say(f"{words} (seed by seed: {each})", gap > scatter)
        if {"full", "sparse", "sla2"} <= set(arms):
            for when, least in WON_BACK.items():
                won = won_back(arms, when)
                if won is not None:
                    words = f"`sla2` wins back {100 * won:.0f} % {when} training"
                    say(f"{words}, {100 * least:.0f} % are expected", won >= least)
        if {"sla2", "sla2-16bit"} <= set(arms):
            gap, scatter = _gap(arms["sla2"], arms["sla2-16bit"])
            words = f"INT8 ends {gap:+.4f} from 16-bit products, the scatter is {scatter:.4f}"
            say(words, abs(gap) <= scatter)
    return found


def _gap(one, other):
    """(difference of final losses, scatter)"""
    (a, da), (b, db) = one["loss after"], other["loss after"]
    return a - b, max(da, db)


def _gaps(runs, keep, worse, better):
    """The difference of final losses for each seed. Arms of a seed train on the same clips."""
    loss = {
        (run["arm"], run["seed"]): run["after"]["loss"]
        for run in runs
        if f"{run['keep']:g}" == keep
    }
    seeds = sorted({seed for _, seed in loss})
    return [
        loss[worse, seed] - loss[better, seed]
        for seed in seeds
        if {(worse, seed), (better, seed)} <= set(loss)
    ]


def verdict(keep, arms):
    """What the figures say, in one sentence."""
    if not {"full", "sparse", "sla2"} <= set(arms):
        return ""
    gone = [won_back(arms, when) for when in WON_BACK]
    seen = f"With {100 * float(keep):g} % of the blocks seen"
    if None in gone:
        return f"{seen}, leaving the others out costs nothing here."
    return (
        f"{seen}, sla2 wins back {100 * gone[0]:.0f} % of what sparse attention loses before "
        f"training and {100 * gone[1]:.0f} % after it."
    )


def as_text(runs):
    lines = []
    for keep, arms in summary(runs).items():
        lines += [f"| {100 * float(keep):g} % seen | {' | '.join(FIGURES)} |", "|---" * 6 + "|"]
        for arm, figures in arms.items():
            cells = [f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in figures.values()]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
        lines.append("")
    for check in checks(runs):
        result = "passed" if check["passed"] else "FAILED"
        lines.append(f"- {result}: {100 * float(check['keep']):g} % seen: {check['what']}.")
    return "\n".join(lines)


def main(files):
    if len(files) != 1:
        sys.exit("expected the file sla2.json that the demo wrote")
    print(as_text(json.loads(Path(files[0]).read_text())["runs"]))


if __name__ == "__main__":
    main(sys.argv[1:])
