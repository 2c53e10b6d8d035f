# SPDX-License-Identifier: Apache-2.0
"""Text to train on: files of several formats become one stream of tokens, and the stream a fixed
order of sequences."""

from .order import Batches, evaluation_windows
from .source import Source, open_data

__all__ = ["Batches", "Source", "evaluation_windows", "open_data"]
