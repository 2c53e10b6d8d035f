# SPDX-License-Identifier: Apache-2.0
"""What the trainer's tests share: a small model, and text that is the same on every machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

from sagebwd.train import preset

HERE = Path(__file__).parent


def text(words=30_000, seed=1):
    """Made-up sentences from a small vocabulary, by a generator written out here: no library and no
    version can change them."""
    vocabulary = (
        "a the one this light stone river winter morning road small old quiet green carries holds "
        "finds keeps under over behind near and but while because"
    ).split()
    out, state = [], seed
    for i in range(words):
        state = (state * 1103515245 + 12345) % 2**31
        out.append(vocabulary[(state >> 16) % len(vocabulary)] + (".\n" if i % 11 == 10 else " "))
    return "".join(out)


def write_text(directory):
    path = Path(directory) / "made_up.txt"
    path.write_text(text())
    return str(path)


def config(directory, **changes):
    """The smallest preset on the made-up text, into ``directory``/run."""
    directory = Path(directory)
    path = directory / "made_up.txt"
    if not path.exists():
        write_text(directory)
    values = dict(
        data=str(path), out=str(directory / "run"), device="cpu", threads=1, log_every=1000,
        eval_every=0, eval_tokens=1024, context=64, tokens_per_step=256, steps=20, warmup=2,
        deterministic=True,
    )  # fmt: skip
    return preset("nano", **{**values, **changes})


def losses(out):
    """(step, loss, gradient norm) of every step of a run's log."""
    lines = (Path(out) / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [(e["step"], e["loss"], e["grad_norm"]) for e in entries if e["kind"] == "step"]


def weights(out):
    """Bytes of the newest checkpoint's files."""
    newest = sorted((Path(out) / "checkpoints").glob("step-*"))[-1]
    return {f.name: f.read_bytes() for f in newest.glob("*.safetensors")}


def command(*arguments):
    return [sys.executable, "-m", "sagebwd.train", *map(str, arguments)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(*arguments, **options):
    """The trainer in a process of its own."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), **options
    )
