# SPDX-License-Identifier: Apache-2.0
"""What the Python tests share: exact attention in float64, error measures, and the gate."""

import os
import sys

import pytest

# Tests of the command-line tool run without PyTorch; everything else here needs it.
torch = pytest.importorskip("torch")

sys.path.insert(0, os.path.dirname(__file__))


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
