# SPDX-License-Identifier: Apache-2.0
"""A trainer for small Llamas, and instruments that show how well INT8 attention does in training.

Start with ``python -m sagebwd.train --help``. :func:`train` and :class:`Config` do the same from
Python.
"""

from .config import Config, preset
from .loop import Trainer, train

__all__ = ["Config", "Trainer", "preset", "train"]
