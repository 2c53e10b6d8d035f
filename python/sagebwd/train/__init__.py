# SPDX-License-Identifier: Apache-2.0
"""A trainer for small Llamas, and the instruments that show how INT8 attention does in it.

``python -m sagebwd.train --help`` is the way in; :func:`train` and :class:`Config` are the same
from Python.
"""

from .config import Config, preset
from .loop import Trainer, train

__all__ = ["Config", "Trainer", "preset", "train"]
