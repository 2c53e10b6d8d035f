# SPDX-License-Identifier: Apache-2.0
"""What the figures of several runs say, in words and as a table."""

import statistics

from .runs import reference_of, repeats_of

#: Final eval losses closer than this count as equal, whatever the spread: what the published
#: comparison resolves.
EQUAL = 0.005


def signed(difference):
    """Four digits and a sign; what rounds to nothing has none."""
    text = f"{difference:+.4f}"
    return "0.0000" if float(text) == 0 else text


def allowed(runs):
    """Difference that counts as equal: 0.005, or twice the deviation of the full-precision runs
    among themselves where there are several."""
    losses = [r.eval_loss for r in repeats_of(runs)]
    return max(EQUAL, 2 * statistics.stdev(losses)) if len(losses) > 1 else EQUAL


def verdict(runs):
    base = reference_of(runs)
    if base is None:
        best = min(runs, key=lambda r: r.eval_loss)
        return f"`{best.name}` has the lowest held-out loss, {best.eval_loss:.4f}."
    parts, limit = [], allowed(runs)
    full = repeats_of(runs)
    for run in runs:
        if run in full:
            continue
        gap = run.eval_loss - base.eval_loss
        how = "matches" if abs(gap) <= limit else "is ahead of" if gap < 0 else "falls behind"
        parts.append(f"`{run.name}` {how} full precision ({signed(gap)})")
    words = "; ".join(parts) + "." if parts else "Nothing to compare with."
    if len(full) > 1 and parts:
        spread = max(r.eval_loss for r in full) - min(r.eval_loss for r in full)
        words += f" {len(full)} full-precision runs are {spread:.4f} apart themselves."
    return words


def table_rows(runs):
    """(titles, rows) for an HTML table."""
    base, limit = reference_of(runs), allowed(runs)
    titles = [
        "attention", "eval loss", "difference", "train loss", "tokens/s", "speed",
        "worst gradient error", "kept per sequence",
    ]  # fmt: skip
    rows = []
    for run in runs:
        gap, speed = ("–", ""), "–"
        if base is not None and run is not base:
            difference = run.eval_loss - base.eval_loss
            gap = (signed(difference), "good" if difference <= limit else "bad")
            speed = f"{run.speed / base.speed:.2f}×"
        worst = run.worst_audit()
        memory = run.summary.get("activation_bytes")
        rows.append(
            [
                f"`{run.name}`",
                f"{run.eval_loss:.4f}",
                gap,
                f"{run.train_loss:.4f}",
                f"{run.speed:.0f}",
                speed,
                "–" if worst is None else f"{100 * worst:.1f}%",
                "–" if memory is None else f"{memory / 2**20:.1f} MiB",
            ]
        )
    return titles, rows


def plain_table(runs):
    """The same for a console."""
    titles, rows = table_rows(runs)
    cells = [[c[0] if isinstance(c, tuple) else c for c in row] for row in [titles, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    return "\n".join(
        "  ".join(
            c.strip("`").ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths))
        )
        for row in cells
    )
