# SPDX-License-Identifier: Apache-2.0
"""Runs side by side as one self-contained HTML page, and its figures as JSON."""

from .page import write_report
from .runs import Run, read_runs

__all__ = ["Run", "read_runs", "write_report"]
