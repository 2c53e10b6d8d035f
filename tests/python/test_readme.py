# SPDX-License-Identifier: Apache-2.0
"""The tables and figures of the documents are what the records under results/ say."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", ["tables.py", "figures.py"])
def test_documents_match_records(tool):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
