# SPDX-License-Identifier: Apache-2.0
"""What the hardware calls itself, for logs and records."""

from ..bench import machine


def describe_machine(device):
    where = machine(device.type)
    return where["gpu"] if "gpu" in where else f"{where['cpu']}, {where['threads']} threads"
