# SPDX-License-Identifier: Apache-2.0
"""``make demo``: a small Llama with full-precision attention, `paper` and `vectorwise`, side by
side, on whatever this machine has. On a CPU some minutes; on a GPU a bigger model.

    python -m sagebwd.train.demo [--out DIR] [options of sagebwd.train]
"""

import sys

import torch

from .__main__ import main

_CPU = ["--preset", "demo", "--log-every", "10", "--eval-every", "30", "--audit-every", "5"]
_GPU = [
    "--preset", "45m", "--steps", "300", "--warmup", "30", "--tokens-per-step", "128K",
    "--log-every", "20", "--eval-every", "50", "--audit-every", "10", "--eval-tokens", "512K",
]  # fmt: skip


def arguments():
    return [
        "--compare", "fpa,paper,vectorwise", "--out", "build/demo", "--sample-tokens", "240",
        "--prompt", "def ", *(_GPU if torch.cuda.is_available() else _CPU),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(arguments() + sys.argv[1:]))
