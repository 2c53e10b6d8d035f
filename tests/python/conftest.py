# SPDX-License-Identifier: Apache-2.0
"""Setting of the Python tests. reference.py holds what they compare with."""

import importlib.util
import os
import sys

import pytest

# Some virtual machines announce AMX and then trap it: PyTorch's own bfloat16 matmul dies there.
# What is compared with PyTorch here does not need it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

sys.path.insert(0, os.path.dirname(__file__))

# The tests of the command-line tool need neither PyTorch nor the installed package; all others do.
_missing = [name for name in ("torch", "sagebwd") if importlib.util.find_spec(name) is None]
if _missing:
    collect_ignore_glob = ["test_[!c]*.py", "test_c[!l]*.py", "train/*"]


def pytest_report_header():
    if _missing:
        return f"not installed: {', '.join(_missing)}; only the tests of the command-line tool run"


# SAGEBWD_TEST_DEVICE=cuda puts every tensor a test makes on the GPU; `cpu_only` tests stay away.
DEVICE = os.environ.get("SAGEBWD_TEST_DEVICE", "cpu")


def pytest_configure(config):
    for marker in (
        "cpu_only: says nothing about a GPU",
        "slow: left out by `make check`",
        "long: run by `make test-all` alone",
    ):
        config.addinivalue_line("markers", marker)


@pytest.fixture(autouse=True)
def _setting(request):
    if _missing:
        return
    import torch

    if DEVICE != "cpu":
        if request.node.get_closest_marker("cpu_only"):
            pytest.skip("cpu_only")
        torch.set_default_device(DEVICE)
    torch.manual_seed(0)
    # The tensors are tiny: more threads only wait for each other.
    torch.set_num_threads(1)
