# SPDX-License-Identifier: Apache-2.0
"""Whether a run may resume from a checkpoint. Everything that changes the result must be the same,
the data too. Only the number of steps may differ; the run then says how the schedule changes."""

from . import checkpoint
from .config import NUMERIC, upgraded
from .errors import BadInput


def open_checkpoint(config, checkpoints, say):
    """(path, state, tensors) that ``config.resume`` asks for, or None."""
    if not config.resume:
        return None
    if config.resume == "auto":
        return checkpoint.load_newest(checkpoints, say)
    path = checkpoint.find(config.resume)
    return (path, *checkpoint.load(path))


def check_fits(config, path, saved, fingerprint):
    """Raises BadInput if the run that continues from ``path`` would silently be another one."""
    was = upgraded(saved["config"])
    differ = [n for n in NUMERIC if n != "steps" and was.get(n) != getattr(config, n)]
    if differ:
        words = ", ".join(f"{n} {was.get(n)!r}, now {getattr(config, n)!r}" for n in differ)
        raise BadInput(
            f"resume: {path} was made by another configuration: {words}. Give the same options, or "
            "start a new run from its weights with --init"
        )
    if saved["step"] > config.steps:
        raise BadInput(
            f"resume: {path} is beyond --steps {config.steps}; give at least {saved['step']}, or "
            "start anew with --overwrite"
        )
    if saved["data"] != fingerprint:
        raise BadInput(
            f"resume: {path} was trained on other data. Give the same --data and --val, or start a "
            "new run from its weights with --init"
        )
