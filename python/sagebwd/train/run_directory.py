# SPDX-License-Identifier: Apache-2.0
"""The directory of a run. One process at a time writes to it. What an earlier run has left there is
kept unless the user says otherwise."""

import errno
import fcntl
import os
import platform
import stat
from pathlib import Path

from . import checkpoint
from .errors import BadInput, InUse, NotSaved, is_disk_error, writing
from .files import read_text, write_text
from .json_text import dumps, load_figures


class RunDirectory:
    """Call ``claim`` before reading or writing anything. Only the first rank claims and writes."""

    def __init__(self, path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._summary = self.path / "summary.json"
        self._lock = self._handle = None

    # --- one process at a time --------------------------------------------------------------------

    def claim(self, say=print):
        """Makes the directory and locks it, until ``release`` or the end of the process, however it
        ends. Locked are the directory itself, which nobody can replace unnoticed, and a file in it
        that names the holder, because a network file system may lock files alone."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._check_links()
            self._lock = _open_own(self.path / "lock")
        except OSError as error:
            self.release()
            kind = NotSaved if is_disk_error(error) else BadInput
            words = error.strerror or error
            raise kind(f"out: {self.path} cannot be written to ({words})") from None
        except BadInput:
            self.release()
            raise
        problems = [_try_lock(handle) for handle in (self._handle, self._lock)]
        if any(isinstance(p, BlockingIOError) for p in problems):
            holder = self._lock.read(200).strip() or "another process"
            self.release()
            raise InUse(
                f"out: {holder} is at work in {self.path}; wait for it, end it, or name another "
                "directory with --out"
            )
        if all(problems):
            say(f"{self.path} cannot be locked ({problems[1].strerror}): start no second run in it")
        with writing(self._lock.name):
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {platform.node()}\n")
            self._lock.flush()

    def _check_links(self):
        """The run writes and removes below these. A link would have it do that elsewhere."""
        for path in (self.checkpoints, self.path / "tensorboard"):
            if path.is_symlink():
                raise BadInput(
                    f"out: {path} is a symbolic link, which a run does not follow; move the whole "
                    "run and give its place as --out (that may be a link)"
                )

    def release(self):
        if self._lock is not None:
            self._lock.close()
        if self._handle is not None:
            os.close(self._handle)
        self._lock = self._handle = None

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
            summary = load_figures(read_text(self._summary))
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and summary.get("steps") == step else None


def _open_own(path):
    """A file of ours to read and write, made if need be; nothing that leads to another place."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise BadInput(f"out: {path} is a link or a socket, no file of a run; remove it") from None
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(handle)
        raise BadInput(
            f"out: {path} is a pipe or a second name of another file, no file of a run; remove it"
        )
    return open(handle, "r+", encoding="utf-8", errors="replace")


def _try_lock(handle):
    """None, or why it is not locked: a BlockingIOError if another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None
