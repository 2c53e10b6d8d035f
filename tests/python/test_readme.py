# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md are what the records under results/ say."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_tables_match_records():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
