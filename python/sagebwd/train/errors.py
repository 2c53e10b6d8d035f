# SPDX-License-Identifier: Apache-2.0
"""How a run can end. Scripts that start runs may rely on the exit codes. They are defined only in
this table; ``--help`` prints it, and a test compares docs/training.md with it."""

import contextlib
import errno
import sys

EXIT_CODES = {
    0: "done",
    1: "a defect of the program: a traceback says where",
    2: "bad options, configuration or data; nothing was trained",
    3: "loss or gradient norm not finite; the weights before that step are saved",
    4: "a file could not be written, such as a checkpoint or the log on a full disk",
    5: "stopped by a signal or --time-limit, state saved",
    6: "another process is at work in the directory of the run",
    130: "interrupted by Ctrl-C outside of training: reading data, writing a report",
}

#: Errors of the disk that no other path or permission would cure.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class RunError(Exception):
    """A run that cannot go on. The message is for the user; no traceback is needed."""

    exit_code = 1


class BadInput(RunError):
    """The configuration or the data is wrong. Raised before the first step."""

    exit_code = 2


class NonFinite(RunError):
    """The loss or the gradient norm is not a number or infinite. Raised before the optimizer
    step."""

    exit_code = 3


class NotSaved(RunError):
    """Something that must not be lost could not be written. Earlier checkpoints are unchanged."""

    exit_code = 4


class Stopped(RunError):
    """A signal or the time limit ended the run early; its state is saved, unless nothing is
    kept."""

    exit_code = 5


class InUse(RunError):
    """Another process has the directory of the run."""

    exit_code = 6


def is_disk_error(error):
    return error.errno in _DISK


@contextlib.contextmanager
def writing(path):
    """If the disk refuses to write inside this block, the run ends with the exit code of
    NotSaved."""
    try:
        yield
    except OSError as error:
        raise NotSaved(
            f"{path} could not be written: {error.strerror or error}; checkpoints saved before are "
            "as they were"
        ) from error


@contextlib.contextmanager
def figures_of(where):
    """Inside this block figures that somebody else may have written are made use of: a record
    without them, or with others, is the user's to repair."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadInput(
            f"{where}: figures are missing or damaged ({type(error).__name__}: {error}); make them "
            "again"
        ) from error


def exit_code(name, work):
    """Calls ``work`` for the command ``name``. What the user can do something about becomes a
    message and an exit code instead of a traceback."""
    try:
        return work() or 0
    except RunError as error:
        return _failed(name, error.exit_code, error)
    except KeyboardInterrupt:
        return _failed(name, 130, "interrupted; what was saved before is kept")
    except MemoryError as error:
        return _failed(name, 2, f"this does not fit into memory ({error or 'none is left'})")
    except OSError as error:
        if not is_disk_error(error):
            raise
        words = f"{error.filename or 'a file'} could not be written: {error.strerror}"
        return _failed(name, 4, words)


def _failed(name, code, words):
    try:
        print(f"{name}: {words}", file=sys.stderr)
    except OSError:
        pass  # the exit code is still there
    return code
