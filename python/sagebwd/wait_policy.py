# SPDX-License-Identifier: Apache-2.0
"""How OpenMP's threads wait for each other. By default they spin, and on a machine that is busy
with other work they then take each other's cores: two threads are slower than one, several times.
``OMP_WAIT_POLICY=passive`` has them sleep. OpenMP reads it once, when PyTorch is loaded."""

import os
import sys

_VARIABLE = "OMP_WAIT_POLICY"
#: Programs of this package that train: they and what is below them.
_PROGRAMS = ("sagebwd.train", "sagebwd.evidence", "sagebwd.sla2.demo")


def settle():
    """Sets the variable in a process that runs one of our programs, unless the user has set it.
    Called before PyTorch is imported. Processes of other programs are theirs to set up."""
    if _runs_program() and "torch" not in sys.modules:
        os.environ.setdefault(_VARIABLE, "passive")


def _runs_program():
    # Python says "-m" here while it imports the packages above the module that it will run.
    if sys.argv[:1] != ["-m"]:
        return False
    words = (word.removeprefix("-m") for word in sys.orig_argv)
    return any(w == p or w.startswith(f"{p}.") for w in words for p in _PROGRAMS)


def note(threads):
    """What a program says where it came too late to settle it, or nothing."""
    if threads < 2 or _VARIABLE in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return ""
    return (
        f"{threads} threads that spin while they wait: set {_VARIABLE}=passive before Python "
        "starts if this machine has other work, which is then several times faster"
    )
