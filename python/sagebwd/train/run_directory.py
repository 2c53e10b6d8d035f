# SPDX-License-Identifier: Apache-2.0
"""The directory of a run. One process at a time writes to it. What an earlier run has left there is
kept unless the user says otherwise."""

import fcntl
import os
import platform
from pathlib import Path

from . import checkpoint
from .errors import BadInput, InUse, NotSaved, is_disk_error, writing
from .files import write_text
from .json_text import dumps, load_figures


class RunDirectory:
    """Call ``claim`` before reading or writing anything. Only the first rank claims and writes."""

    def __init__(self, path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._summary = self.path / "summary.json"
        self._lock = None

    # --- one process at a time --------------------------------------------------------------------

    def claim(self, say=print):
        """Makes the directory and locks it. The lock ends with the process, however it ends; the
        file stays, because removing it would let two processes lock two files."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "a+")
        except OSError as error:
            kind = NotSaved if is_disk_error(error) else BadInput
            words = error.strerror or error
            raise kind(f"out: {self.path} cannot be written to ({words})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read(200).strip() or "another process"
            self.release()
            raise InUse(
                f"out: {holder} is at work in {self.path}; wait for it, end it, or name another "
                "directory with --out"
            ) from None
        except OSError as error:
            say(f"{self.path} cannot be locked ({error.strerror}): start no second run in it")
        with writing(self._lock.name):
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {platform.node()}\n")
            self._lock.flush()

    def release(self):
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- what a former run has left ---------------------------------------------------------------

    def clear_after(self, step, overwrite, going_on):
        """Clears checkpoints beyond the step at which this run begins, which would be taken for its
        own. If the run resumes (``going_on``), they could not be read, and are put aside under
        another name. If it starts anew, they are removed if ``overwrite`` says so. Returns the new
        paths of what was put aside."""
        found = checkpoint.list_checkpoints(self.checkpoints)
        later = [p for p in found if checkpoint.step_of(p) > step]
        if going_on:
            with writing(self.checkpoints):
                return [checkpoint.put_aside(p) for p in later]
        if later and not overwrite:
            raise BadInput(
                f"out: {self.path} holds a run up to step {checkpoint.step_of(later[-1])}; "
                "go on with --resume auto, start anew with --overwrite, or name another directory"
            )
        for path in later:
            checkpoint.remove(path)
        return []

    # --- small files ------------------------------------------------------------------------------

    def write_config(self, config):
        with writing(self.path / "config.json"):
            write_text(self.path / "config.json", config.to_json())

    def write_summary(self, summary):
        with writing(self._summary):
            write_text(self._summary, dumps(summary, indent=1) + "\n")

    def remove_summary(self):
        with writing(self._summary):
            self._summary.unlink(missing_ok=True)

    def read_summary(self, step):
        """The summary of a run that ended at ``step``. None: it did not, or the file is damaged."""
        try:
            summary = load_figures(self._summary.read_text())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and summary.get("steps") == step else None
