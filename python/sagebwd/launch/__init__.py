# SPDX-License-Identifier: Apache-2.0
"""Any script with INT8 attention, without editing it.

    sagebwd run -- accelerate launch train.py …

``sagebwd run`` (``python -m sagebwd.launch``) starts the command with two additions to its
environment: a directory in front of PYTHONPATH, whose ``sitecustomize`` Python runs at the start of
each process below the command, and the settings. Nothing else on the machine changes. In those
processes :mod:`.child` waits for PyTorch and frameworks to be imported and then switches the hooks
of ``sagebwd.integrations`` on. Each process leaves a record of what it saw, and the command ends
with a summary of all of them.
"""

import functools
import sys

CHILD = "sagebwd_run_child"  # the name under which a started process loads child.py


def counted(hook, function):
    """A function of a stand-in module that computes with the recipe of the command and counts its
    calls in the record of this process."""
    import torch

    child = sys.modules.get(CHILD)
    if child is None:
        return function
    report, recipe = child.report(hook), child.settings["recipe"]
    # Runs while code is traced, and not again.
    traced = torch.compiler.assume_constant_result(lambda: report.ran())

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            out = function(*args, recipe=recipe, **kwargs)
        except NotImplementedError as error:
            report.refused[str(error).removeprefix("sagebwd: ")] += 1
            raise
        traced() if torch.compiler.is_compiling() else report.ran()
        return out

    return call


def absent(hook, name, remedy):
    """A name that scripts import beside the others, but that this library cannot compute."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"sagebwd: {hook}.{name} is not supported: {remedy}")

    refuse.__name__ = name
    return refuse
