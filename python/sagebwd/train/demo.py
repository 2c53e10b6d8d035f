# SPDX-License-Identifier: Apache-2.0
"""``make demo``: a small Llama with full-precision attention, `paper` and `vectorwise`, side by
side, on whatever this machine has. On a CPU some minutes; on a GPU a bigger model.

A second full-precision run differs from the first in nothing but the order of its sums (it takes
the batch in two parts). Rounding in the last bit grows as training goes on: how far these two end
up apart is what a comparison of this length cannot resolve.

    python -m sagebwd.train.demo [--out DIR] [options of sagebwd.train]
"""

import sys

import torch

from .__main__ import main

_CPU = ["--preset", "demo", "--log-every", "10", "--eval-every", "25", "--audit-every", "5",
        "--eval-tokens", "32K"]  # fmt: skip
_GPU = [
    "--preset", "45m", "--steps", "300", "--warmup", "30", "--tokens-per-step", "128K",
    "--log-every", "20", "--eval-every", "50", "--audit-every", "10", "--eval-tokens", "512K",
]  # fmt: skip


def arguments():
    on_gpu = torch.cuda.is_available()
    arms = f"fpa,fpa-split=fpa:micro_batch={32 if on_gpu else 2},paper,vectorwise"
    size = _GPU if on_gpu else _CPU
    return ["--compare", arms, "--out", "build/demo", *size, "--sample-tokens", "240",
            "--prompt", "def ", "--overwrite"]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(arguments() + sys.argv[1:]))
