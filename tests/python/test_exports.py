# SPDX-License-Identifier: Apache-2.0
"""What the compiled operators show to the process that loads them, and how they were hardened."""

import subprocess
from pathlib import Path

from sagebwd import _library

SCRIPT = Path(__file__).parents[1] / "consumer" / "exports.sh"


def test_operators_show_nothing_but_their_error_type():
    found = [r / "lib" / "libsagebwd_torch.so" for r in _library.install_roots()]
    library = next(path for path in found if path.exists())
    done = subprocess.run([SCRIPT, "--torch", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
