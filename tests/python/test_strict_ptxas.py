# SPDX-License-Identifier: Apache-2.0
"""cmake/strict_ptxas.sh fails where ptxas notes that it has serialised products, and only there."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cmake" / "strict_ptxas.sh"
SERIALIZED = "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async is serialized"
REGISTERS = "ptxas info    : Used 168 registers, used 1 barriers"


@pytest.mark.parametrize(
    ("note", "status", "ends"), [(REGISTERS, 0, 0), (REGISTERS, 2, 2), (SERIALIZED, 0, 1)]
)
def test_ends_as_the_notes_say(tmp_path, note, status, ends):
    made = tmp_path / "kernel.o"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "{note}" >&2\ntouch "$2"\nexit {status}\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, compiler, "-o", made, "kernel.cu"], capture_output=True, text=True
    )
    assert done.returncode == ends and note in done.stderr
    assert made.exists() == (note == REGISTERS)  # else the next build would take it
