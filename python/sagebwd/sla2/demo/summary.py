# SPDX-License-Identifier: Apache-2.0
"""python -m sagebwd.sla2.demo.summary sla2.json...: several runs of the demo as one table: mean and
standard deviation over seeds, for each share of blocks and kind of attention."""

import json
import statistics
import sys
from pathlib import Path


def summary(records):
    """{keep: {arm: {figure: (mean, deviation)}}}; figures: loss and PSNR before and after, time."""
    found = {}
    for record in records:
        for name, arm in record["arms"].items():
            figures = found.setdefault(record["keep"], {}).setdefault(name, {})
            for when in ("before", "after"):
                for kind in ("loss", "psnr"):
                    figures.setdefault(f"{kind} {when}", []).append(arm[when][kind])
            figures.setdefault("seconds per step", []).append(arm["step_seconds"])
    spread = lambda x: (statistics.mean(x), statistics.stdev(x) if len(x) > 1 else 0.0)
    return {
        keep: {arm: {k: spread(x) for k, x in figures.items()} for arm, figures in arms.items()}
        for keep, arms in found.items()
    }


def as_table(found):
    lines = []
    for keep, arms in sorted(found.items(), reverse=True):
        titles = list(next(iter(arms.values())))
        lines += [f"| {100 * keep:g} % seen | {' | '.join(titles)} |", "|---" * 6 + "|"]
        for arm, figures in arms.items():
            cells = [f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in figures.values()]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main(files):
    if not files:
        sys.exit("expected files sla2.json that the demo wrote")
    print(as_table(summary([json.loads(Path(file).read_text()) for file in files])))


if __name__ == "__main__":
    main(sys.argv[1:])
