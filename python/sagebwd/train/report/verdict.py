# SPDX-License-Identifier: Apache-2.0
"""What the figures of several runs say, in words and as a table. Every statement carries its error
bar, and none goes beyond it."""

import textwrap

from .noise import LEAST, compared_with, late_mean, noise_of, repeats_of, speed_bar
from .runs import reference_of


def signed(difference):
    """Four digits and a sign; a number that rounds to zero has no sign."""
    text = f"{difference:+.4f}"
    return "0.0000" if float(text) == 0 else text.replace("-", "−")


def level(run, base, noise):
    """within the noise, ahead or behind."""
    gap = run.eval_loss - base.eval_loss
    return "within" if abs(gap) <= noise.loss else "ahead" if gap < 0 else "behind"


def verdict(runs):
    """One sentence on the held-out losses."""
    base = reference_of(runs)
    if base is None:
        best = min(runs, key=lambda r: r.eval_loss)
        return f"`{best.name}` has the lowest held-out loss, {best.eval_loss:.4f}."
    noise, by_level = noise_of(runs), {}
    for run in compared_with(runs):
        gap = signed(run.eval_loss - base.eval_loss)
        by_level.setdefault(level(run, base, noise), []).append(f"`{run.name}` ({gap})")
    if not by_level:
        return "Nothing to compare with."
    ends = {
        "within": ("is", "are", "within the noise of full precision"),
        "ahead": ("ends", "end", "ahead of full precision, beyond the noise"),
        "behind": ("ends", "end", "behind full precision, beyond the noise"),
    }
    parts = []
    for how, names in by_level.items():
        one, many, rest = ends[how]
        parts.append(f"{_list(names)} {one if len(names) == 1 else many} {rest}")
    return f"{'; '.join(parts)} (± {noise.loss:.4f})."


def _list(names):
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def noise_words(runs):
    """Where the error bar of the held-out losses comes from, and what it allows to say."""
    base = reference_of(runs)
    if base is None or not compared_with(runs):
        return ""
    noise, repeats = noise_of(runs), repeats_of(runs)
    if not repeats:
        return (
            f"No second full-precision run measured the noise: up to {LEAST} in held-out loss "
            "counts as none."
        )
    names = _list([f"`{r.name}`" for r in repeats])
    last = max(abs(r.eval_loss - base.eval_loss) for r in repeats)
    words = (
        f"The error bar is measured. {names} is `{base.name}` once more with other seeds: the two "
        f"end {last:.4f} apart, and {noise.apart:.4f} on average over the second half of training "
        "(root mean square). "
    )
    if noise.loss > noise.apart:
        words += f"Differences up to {LEAST} count as none in any case. "
    return words + (
        "Within the noise, a comparison this short cannot tell a recipe from full precision. That "
        "does not prove them equal."
    )


def paired_words(runs):
    """The closer comparison: the same batches, step by step."""
    base = reference_of(runs)
    means = [(r.name, late_mean(r, base)) for r in compared_with(runs)] if base else []
    parts = [f"`{name}` {signed(m[0])} ± {m[1]:.4f}" for name, m in means if m]
    if not parts:
        return ""
    return (
        "Runs that share start and data can be compared more closely. Training loss on the same "
        f"batches, mean over the second half of the steps, against `{base.name}`: "
        f"{', '.join(parts)} (95 % intervals)."
    )


def speed_words(runs):
    """Speeds against the reference, with their error bars."""
    base = reference_of(runs)
    if base is None or not compared_with(runs):
        return ""
    noise, parts = noise_of(runs), []
    for run in compared_with(runs):
        ratio, bar = run.speed / base.speed, speed_bar(run, base, noise)
        how = "no difference seen" if abs(ratio - 1) <= bar else "faster" if ratio > 1 else "slower"
        parts.append(f"`{run.name}` {ratio:.2f}× ± {bar:.2f} ({how})")
    words = f"Speed of whole training steps against `{base.name}`: {', '.join(parts)}."
    if noise.speed is not None:
        words += f" Two equal runs differ by {100 * noise.speed:.1f} %."
    else:
        words += " No equal run shows how much speed varies by itself."
    return words


def table_rows(runs):
    """(titles, rows) for an HTML table."""
    base = reference_of(runs)
    noise = noise_of(runs) if base else None
    compared = compared_with(runs) if base else []
    titles = [
        "attention", "held-out loss", "difference", "tokens/s", "speed",
        "worst audited gradient", "kept per sequence",
    ]  # fmt: skip
    rows = []
    for run in runs:
        gap, speed = "–", "–"
        if base is not None and run is not base:
            gap = signed(run.eval_loss - base.eval_loss)
            speed = f"{run.speed / base.speed:.2f}×"
        if any(run is c for c in compared):
            bad = level(run, base, noise) == "behind"
            gap = (f"{gap} ± {noise.loss:.4f}", "bad" if bad else "good")
            speed += f" ± {speed_bar(run, base, noise):.2f}"
        worst = run.worst_audit()
        memory = run.summary.get("activation_bytes")
        rows.append(
            [
                f"`{run.name}`",
                f"{run.eval_loss:.4f}",
                gap,
                f"{run.speed:.0f}",
                speed,
                "–" if worst is None else f"{100 * worst:.1f}%",
                "–" if memory is None else f"{memory / 2**20:.1f} MiB",
            ]
        )
    return titles, rows


def plain_verdict(runs):
    """Table and words for a console."""
    words = [verdict(runs), noise_words(runs), speed_words(runs)]
    text = [textwrap.fill(w.replace("`", ""), 100) for w in words if w]
    return "\n\n".join([plain_table(runs), *text])


def plain_table(runs):
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
