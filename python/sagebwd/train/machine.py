# SPDX-License-Identifier: Apache-2.0
"""What the hardware calls itself, for logs and records, and how much it holds."""

import os

from ..tools.bench import machine


def describe_machine(device):
    where = machine(device.type)
    return where["gpu"] if "gpu" in where else f"{where['cpu']}, {where['threads']} threads"


def memory():
    """Bytes of this machine's main memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
