# SPDX-License-Identifier: Apache-2.0
"""How a run can end. The exit codes are a promise: scripts that start runs may rely on them."""

FINISHED = 0
BAD_INPUT = 2  # configuration or data; nothing was trained
NON_FINITE = 3  # loss or gradient norm; the weights before the step are saved
NOT_SAVED = 4  # the last checkpoint could not be written
STOPPED = 5  # by a signal or the time limit, state saved: continue with --resume auto


class RunError(Exception):
    """A run that cannot go on. The message is for the user; no traceback is needed."""

    exit_code = 1


class BadInput(RunError):
    """The configuration or the data is wrong. Raised before the first step."""

    exit_code = BAD_INPUT


class NonFinite(RunError):
    """The loss or the gradient norm is not a number or infinite. Raised before the optimizer
    step."""

    exit_code = NON_FINITE


class NotSaved(RunError):
    """The last checkpoint could not be written."""

    exit_code = NOT_SAVED


class Stopped(RunError):
    """A signal or the time limit ended the run early; its state is saved, unless nothing is kept."""

    exit_code = STOPPED
