# SPDX-License-Identifier: Apache-2.0
"""Starts the sagebwd program, which a wheel carries inside the Python package; `sagebwd run` and
`sagebwd doctor` are Python modules. A module of its own, because importing the package would import
PyTorch, which the program and the launcher do not need."""

import importlib.util
import os
import sys

#: What the program's own help cannot know of.
ALSO = """Of the Python package:
  run                         A command and its processes with INT8 attention
  doctor                      What INT8 attention would do to a checkpoint

Of the program:
"""


def main():
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(ALSO, flush=True)
    package = importlib.util.find_spec("sagebwd")
    if package is None:
        sys.exit("sagebwd: the Python package is not installed for " + sys.executable)
    if sys.argv[1:2] == ["doctor"]:
        doctor = [sys.executable, "-m", "sagebwd.tools.doctor", *sys.argv[2:]]
        os.execv(sys.executable, doctor)
    for directory in package.submodule_search_locations:
        if sys.argv[1:2] == ["run"]:
            launcher = os.path.join(directory, "launch", "__main__.py")
            os.execv(sys.executable, [sys.executable, launcher, *sys.argv[2:]])
        program = os.path.join(directory, "bin", "sagebwd")
        if os.path.exists(program):
            os.environ.setdefault("SAGEBWD_PYTHON", sys.executable)  # which makes pages
            os.execv(program, ["sagebwd", *sys.argv[1:]])
    sys.exit("sagebwd: this installation does not hold the command-line program")
