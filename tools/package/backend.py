# SPDX-License-Identifier: Apache-2.0
"""The build backend of the Python package: scikit-build-core, with the headers of the installed
PyTorch.

The operators need only headers of PyTorch. An isolated build would download all of PyTorch for
them, although the environment that gets the package usually has it. So we look for PyTorch there
first, and make it a build requirement only if it is missing.
"""

import importlib.util
import os
import re
import sysconfig
import tempfile
from pathlib import Path

from progress import Progress
from scikit_build_core import build as _scikit
from scikit_build_core.build import *  # noqa: F403

_OLDEST = (2, 11)
_REQUIREMENT = "torch>=2.11"


def _version(directory):
    """(major, minor) of the PyTorch in this directory; none gives (0, 0)."""
    try:
        text = (directory / "version.py").read_text()
    except OSError:
        return (0, 0)
    found = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


def find_torch():
    """PyTorch's directory, in this process's path or in the environment that an isolated build
    hides from it; or None."""
    spec = importlib.util.find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    places += [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    return next((p for p in places if _version(p) >= _OLDEST), None)


def _with_torch(settings):
    settings = dict(settings or {})
    torch = find_torch()
    if torch is not None:
        settings.setdefault("cmake.define.SAGEBWD_TORCH_DIR", str(torch))
    return settings


def get_requires_for_build_wheel(config_settings=None):
    needed = _scikit.get_requires_for_build_wheel(config_settings)
    return needed if find_torch() else [*needed, _REQUIREMENT]


def get_requires_for_build_editable(config_settings=None):
    needed = _scikit.get_requires_for_build_editable(config_settings)
    return needed if find_torch() else [*needed, _REQUIREMENT]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    settings = _with_torch(config_settings)
    if os.access(".", os.W_OK):  # a build inside the source tree, where the next one finds it
        with Progress(settings.get("build-dir", "build-wheel")):
            return _scikit.build_wheel(wheel_directory, settings, metadata_directory)
    with tempfile.TemporaryDirectory(prefix="sagebwd-build-") as directory:
        settings.setdefault("build-dir", directory)
        with Progress(settings["build-dir"]):
            return _scikit.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _scikit.build_editable(wheel_directory, _with_torch(config_settings), metadata_directory)
