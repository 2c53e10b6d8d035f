# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run saw, in words."""

import json
import pathlib


def read(directory):
    """The records of all processes."""
    return [json.loads(path.read_text()) for path in sorted(pathlib.Path(directory).glob("*.json"))]


def added(records):
    """{hook: counts} over all processes."""
    hooks = {}
    for record in records:
        for hook, counts in record["hooks"].items():
            total = hooks.setdefault(hook, dict(calls=0, passed_on={}, refused={}))
            total["calls"] += counts["calls"]
            for kind in ("passed_on", "refused"):
                for reason, count in counts[kind].items():
                    total[kind][reason] = total[kind].get(reason, 0) + count
    return hooks


def lines(records):
    hooks = added(records)
    busy = sum(any(c["calls"] for c in r["hooks"].values()) for r in records)
    yield f"sagebwd run: {len(records)} processes imported PyTorch, {busy} computed INT8 attention"
    for hook, counts in hooks.items():
        if counts["calls"] or counts["passed_on"] or counts["refused"]:
            yield f"  {hook}: {counts['calls']} calls ran here"
        for reason, count in counts["passed_on"].items():
            yield f"    elsewhere{f', {count} calls' if count else ''}: {reason}"
        for reason, count in counts["refused"].items():
            yield f"    refused, {count} calls: {reason}"
    for sentence in dict.fromkeys(note for record in records for note in record["notes"]):
        yield f"  note: {sentence}"
    others = sorted({name for record in records for name in record["others"]})
    if others:
        yield f"  other attention was imported, whose calls are not seen here: {', '.join(others)}"
    if killed := sum(not record["final"] for record in records):
        yield f"  {killed} processes were killed or left by os._exit: their calls are missing here"
    if not records:
        yield (
            "  No process reported: they run in a container or on another machine, or Python with "
            "-E, -I or -S, or nothing imports PyTorch."
        )
    elif not busy:
        yield "  NOTHING ran in INT8: the script computes attention by other means."
