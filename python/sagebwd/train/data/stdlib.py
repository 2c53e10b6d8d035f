# SPDX-License-Identifier: Apache-2.0
"""Text that every machine with Python has: the sources of its standard library."""

import platform
import sysconfig
from pathlib import Path

from ..errors import BadInput
from .shards import Shard

_BYTES = 8 << 20
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def read_stdlib(tokenizer):
    """Up to 8 MB of it, in the order of the files' names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(root).parts[:-1]):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        pieces.append(text)
        size += len(text)
        if size > _BYTES:
            break
    if size < 1 << 20:
        raise BadInput(
            f"data: {root} holds no sources of the standard library to train on; give --data"
        )
    name = f"the standard library of Python {platform.python_version()}"
    return Shard(name, tokenizer.encode("\n".join(pieces)[:_BYTES]), tokenizer.vocab)
