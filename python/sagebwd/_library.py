# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the compiled operators, and finds the C++ package of the same build."""

import ctypes
import sys
from importlib import metadata
from pathlib import Path

import torch

_CORE = "libsagebwd.so"
_NAME = "libsagebwd_torch.so"

#: Where autograd of eager calls runs, in words.
autograd = "C++"


def install_roots():
    """Directories that may hold ``lib/`` and ``include/``. The parts of this package may be
    installed in several places."""
    return [Path(p) for p in sys.modules[__package__].__path__]


def load():
    """Registers ``torch.ops.sagebwd``. A second call does nothing."""
    for root in install_roots():
        path = root / "lib" / _NAME
        if path.exists():
            # By its full path, so that no other directory of the loader can replace it.
            ctypes.CDLL(str(path.with_name(_CORE)))
            torch.ops.load_library(str(path))
            _load_autograd(path.parent)
            _check_package()
            return
    raise ImportError(
        f"sagebwd: {_NAME} is not beside the Python files (looked in "
        f"{', '.join(str(r / 'lib') for r in install_roots())}); install the package "
        "with pip; the source directory alone has no compiled code"
    )


def _load_autograd(directory):
    """Registers ``torch.ops.sagebwd.attend``, if it was compiled for this very PyTorch. Without it
    calls give the same results, and take longer."""
    global autograd
    path = directory / f"libsagebwd_autograd_{torch.__version__}.so"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        why = error.__cause__ or error if path.exists() else "built with another PyTorch"
        autograd = f"Python ({why}; install sagebwd again for C++, which is faster)"


def _check_package():
    """Refuses Python files and libraries of different versions: a half-finished installation."""
    try:
        package = metadata.distribution("sagebwd")
    except metadata.PackageNotFoundError:
        return
    place = Path(package.locate_file("sagebwd")).resolve()
    if place not in [root.resolve() for root in install_roots()]:
        return  # the metadata are of another copy
    python, compiled = package.version.partition("+")[0], version()
    if python != compiled:
        raise ImportError(
            f"sagebwd: the Python package is version {python}, but its libraries are "
            f"{compiled}; install the package again"
        )


def version():
    return torch.ops.sagebwd.version()


def build():
    """The backends of this build, in words."""
    return torch.ops.sagebwd.build()


def cmake_dir():
    """The directory for ``find_package(sagebwd)``: pass it as ``sagebwd_DIR``."""
    for root in install_roots():
        path = root / "lib" / "cmake" / "sagebwd"
        if path.is_dir():
            return path
    raise FileNotFoundError("sagebwd: this installation carries no CMake package")
