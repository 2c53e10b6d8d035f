# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a directory ``step-00000100`` with ``weights.safetensors``,
``optimizer.safetensors`` and ``state.json``, which holds everything else, the SHA-256 of the other
files and one of its own content.

A directory is written under a temporary name, every file is flushed to the disk, and the directory
is renamed last. So a directory with the final name is complete. Nothing in it is ever executed;
there is no pickle.
"""

import hashlib
import math
import os
import re
import shutil
from pathlib import Path

from .errors import BadInput
from .files import read_bytes, sync_directory, write_new
from .json_text import dumps, loads
from .tensor_file import read_tensors, write_tensors

FORMAT = 2  # 1 had no checksum of state.json; it is still read
_FILES = {"weights", "optimizer"}
# ``.replaced``: the older of two checkpoints of one step, for the moment between two renames.
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")


# --- writing --------------------------------------------------------------------------------------


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
        state = {"format": FORMAT, "step": step, "sha256": sums, **state}
        state["checksum"] = _checksum(state)
        write_new(temporary / "state.json", dumps(state, indent=1) + "\n")
        sync_directory(temporary)
        _put_in_place(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if name is None:
        for old in list_checkpoints(root)[:-keep]:
            remove(old)
    return final


def _put_in_place(temporary, final):
    """Replaces a checkpoint of the same step, after a resume. The older one can be found until the
    new one has its name."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if replaced.exists():  # left by a process that was killed here; ``final`` is the newer
            remove(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync_directory(final.parent)
    if replaced.exists():
        remove(replaced)


def put_aside(path):
    """Gives a checkpoint that cannot be used a name that nothing looks for. Returns its new
    path."""
    names = [f"aside-{path.name}", *(f"aside-{path.name}-{n}" for n in range(2, 1000))]
    aside = next(p for p in map(path.with_name, names) if not p.exists())
    os.rename(path, aside)
    sync_directory(path.parent)
    return aside


def remove(path):
    """Removes a directory, after renaming it: one that is half removed must not look complete."""
    doomed = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(root):
    """Removes what processes left that were killed while saving."""
    for path in root.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


# --- reading --------------------------------------------------------------------------------------


def load(path):
    """(state, {"weights": {...}, "optimizer": {...}}) of a checkpoint; every checksum is
    compared. Raises BadInput."""
    path = Path(path)
    state, tensors = read_state(path), {}
    for name, expected in state["sha256"].items():
        file = path / f"{name}.safetensors"
        try:
            tensors[name] = read_tensors(file, expected)
        except OSError as error:
            raise BadInput(f"{file}: cannot be read ({error.strerror or error})") from None
    return state, tensors


def read_state(path):
    """The state of a checkpoint, checked in itself and against the directory's name."""
    path = Path(path)
    try:
        raw = read_bytes(path / "state.json")
    except OSError as error:
        raise BadInput(f"{path}: not a readable checkpoint ({error.strerror or error})") from None
    return parse_state(raw, path)


def parse_state(raw, path):
    """The same from the bytes of ``path``/state.json."""
    file = path / "state.json"
    try:
        state = loads(raw.decode("utf-8"))
        if state["format"] not in (1, FORMAT):
            raise BadInput(f"{path}: format {state['format']!r}, this version reads 1 and {FORMAT}")
        found = state.pop("checksum", None)
        if found != (_checksum(state) if state["format"] == FORMAT else None):
            raise BadInput(f"{file} is damaged: its checksum differs from its content")
        problem = _problem(state, path.name)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        raise BadInput(f"{file} is damaged") from None
    if problem:
        raise BadInput(f"{file} is damaged, or the directory renamed: {problem}")
    return state


def _problem(state, name):
    """What contradicts itself, in words. A missing field raises."""
    step, seconds, config = state["step"], state["seconds"], state["config"]
    named = _NAME.fullmatch(name)
    if type(step) is not int or step < 0:
        return f"step is {step!r}"
    if named and int(named[1]) != step:
        return f"it says step {step}, the directory is named {name}"
    if state["sequences_read"] != step * (config["tokens_per_step"] // config["context"]):
        return f"sequences_read is {state['sequences_read']!r} at step {step}"
    if not math.isfinite(seconds) or seconds < 0:
        return f"seconds is {seconds!r}"
    if type(state["vocab"]) is not int or not isinstance(state["data"], str):
        return f"vocab is {state['vocab']!r}, data is {state['data']!r}"
    if set(state["sha256"]) != _FILES:
        return "it names other files than weights and optimizer"
    return None


def _checksum(state):
    """A checksum of the content, not of the text: it covers what is read."""
    return hashlib.sha256(dumps(state, sort_keys=True).encode()).hexdigest()


# --- finding --------------------------------------------------------------------------------------


def list_checkpoints(root):
    """Complete checkpoints, oldest first."""
    try:
        found = [p for p in Path(root).iterdir() if _NAME.fullmatch(p.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:  # not the same as "there are none"
        raise BadInput(f"{root}: cannot be read ({error.strerror or error})") from None
    # Of two of one step, the one that replaces the other comes last.
    return sorted(found, key=lambda p: (step_of(p), not p.name.endswith(".replaced")))


def step_of(path):
    return int(_NAME.fullmatch(Path(path).name)[1])


def load_newest(root, warn=print):
    """(path, state, tensors) of the newest sound checkpoint, or None if there are none. One that
    cannot be read is named through ``warn`` and passed over. Raises BadInput if none of them can be
    read, because only the user can decide to start anew."""
    found = list_checkpoints(root)
    for path in reversed(found):
        try:
            return (path, *load(path))
        except BadInput as error:
            warn(f"checkpoint passed over: {error}")
    if found:
        raise BadInput(
            f"resume: none of the {len(found)} checkpoints in {root} can be read, see above; they "
            "are kept. Start anew with --overwrite instead of --resume, or in another directory"
        )
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
