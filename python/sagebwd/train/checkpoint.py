# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a directory ``step-00000100`` with ``weights.safetensors``,
``optimizer.safetensors`` and ``state.json``, which holds everything else and the SHA-256 of the
other files.

A directory is written under a temporary name, every file flushed to the disk, and renamed last: one
that has its name is complete. Nothing in it is ever executed; there is no pickle.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from .errors import BadInput
from .tensor_file import read_tensors, write_tensors

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")


def save(root, step, tensors, state, keep, name=None):
    """Writes checkpoint ``step`` under ``root``: tensors {"weights": {...}, "optimizer": {...}} and
    a JSON-able state. Then removes all but the last ``keep``. An OSError leaves the older ones as
    they were."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    final = root / (name or f"step-{step:08d}")
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir()
        sums = {f: write_tensors(temporary / f"{f}.safetensors", t) for f, t in tensors.items()}
        _write_text(
            temporary / "state.json",
            json.dumps({"format": FORMAT, "step": step, "sha256": sums, **state}, indent=1) + "\n",
        )
        _sync_directory(temporary)
        if final.exists():  # the same step again, after a resume: the new one replaces it
            remove(final)
        os.rename(temporary, final)
        _sync_directory(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if name is None:
        for old in list_checkpoints(root)[:-keep]:
            remove(old)
    return final


def load(path):
    """(state, {"weights": {...}, "optimizer": {...}}) of a checkpoint; every checksum is
    compared."""
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text())
        if state["format"] != FORMAT:
            raise BadInput(f"{path}: format {state['format']}, this version reads {FORMAT}")
        tensors = {}
        for name, expected in state["sha256"].items():
            file = path / f"{Path(name).name}.safetensors"
            if _sha256(file) != expected:
                raise BadInput(f"{file}: damaged, its checksum differs from the one in state.json")
            tensors[name] = read_tensors(file)
    except OSError as error:
        raise BadInput(f"{path}: not a readable checkpoint ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path}: state.json is damaged") from None
    return state, tensors


def list_checkpoints(root):
    """Complete checkpoints, oldest first."""
    root = Path(root)
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if _NAME.fullmatch(p.name))


def step_of(path):
    return int(_NAME.fullmatch(Path(path).name)[1])


def load_newest(root, warn=print):
    """(path, state, tensors) of the newest sound checkpoint, or None. One that is damaged is named
    through ``warn`` and passed over."""
    for path in reversed(list_checkpoints(root)):
        try:
            return (path, *load(path))
        except BadInput as error:
            warn(f"checkpoint passed over: {error}")
    return None


def find(where):
    """A checkpoint from its own path or from the path of a run."""
    where = Path(where)
    if (where / "state.json").is_file():
        return where
    found = list_checkpoints(where / "checkpoints")
    if not found:
        raise BadInput(f"{where}: neither a checkpoint nor a run with checkpoints")
    return found[-1]


def remove(path):
    """Under another name first: a directory half removed must not look complete."""
    doomed = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(root):
    """Of processes that were killed while saving."""
    for path in root.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _write_text(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
