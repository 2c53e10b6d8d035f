# SPDX-License-Identifier: Apache-2.0
"""Python runs this at the start of each process below ``sagebwd run``, because this directory comes
first in PYTHONPATH there. First comes the sitecustomize that would have run without it."""

import importlib
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _here]
_own = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ImportError as error:
    if error.name != "sitecustomize":
        raise
finally:
    sys.modules.setdefault("sitecustomize", _own)

if "SAGEBWD_RUN" in os.environ:
    # By its path: importing the package would import PyTorch, which most processes do not need.
    _path = os.path.join(os.path.dirname(_here), "child.py")
    _spec = importlib.util.spec_from_file_location("sagebwd_run_child", _path)
    _child = importlib.util.module_from_spec(_spec)
    sys.modules[_spec.name] = _child
    _spec.loader.exec_module(_child)
    _child.start()
