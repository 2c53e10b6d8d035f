# SPDX-License-Identifier: Apache-2.0
"""Tokens per step to micro-batches: how many sequences each rank takes at a time, and how often."""

from dataclasses import dataclass

from .errors import BadInput

#: Tokens of a micro-batch when its size is left to us.
_TOKENS = {"cuda": 65_536, "cpu": 8_192}


@dataclass(frozen=True)
class BatchPlan:
    sequences: int  # of a step, all ranks
    local: int  # of a step, this rank
    micro: int  # of one forward
    accumulate: int  # forwards of a step


def plan_batch(config, readers, device):
    """``readers``: ranks that read different sequences."""
    sequences = config.sequences
    if sequences % readers:
        raise BadInput(
            f"tokens_per_step: {sequences} sequences of {config.context} tokens cannot be dealt to "
            f"{readers} ranks evenly; a multiple of {readers * config.context} would do"
        )
    local = sequences // readers
    micro = config.micro_batch
    if micro == 0:
        most = max(1, _TOKENS[device.type] // config.context)
        micro = max(n for n in range(1, min(local, most) + 1) if local % n == 0)
    if local % micro:
        raise BadInput(
            f"micro_batch: expected a divisor of the {local} sequences of a rank and step, got "
            f"{micro}"
        )
    return BatchPlan(sequences, local, micro, local // micro)
