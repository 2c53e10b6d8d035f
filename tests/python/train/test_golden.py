# SPDX-License-Identifier: Apache-2.0
"""The loss curves of golden_curve.json are reproduced: bit for bit on the hardware and versions
that the file names, within 5 % elsewhere.

``python tests/python/train/test_golden.py`` writes the file anew.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]

import tiny  # noqa: E402
from sagebwd._ops import attention as ops  # noqa: E402
from sagebwd.train import Trainer  # noqa: E402

FILE = Path(__file__).parent / "golden_curve.json"
STEPS = 60
ARMS = {
    "fpa": dict(attention="fpa"),
    "vectorwise": dict(),
    "paper": dict(recipe="paper"),
    "paper-dither": dict(recipe="paper rounding=dither"),
}


def where():
    """What can change the last bit: processor, versions, kernels."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    one = lambda key: re.search(rf"^{key}\s*: (.*)$", info, re.M)
    words = [m[1] for m in map(one, ("model name", "cpu family", "model", "stepping")) if m]
    flags = one("flags")
    q = torch.empty(1, 1, 128, 64)
    chosen = [n for n, state, _ in ops.explain(q, q, q, ops.Options()) if state == "chosen"]
    return {
        "cpu": ", ".join(words),
        "cpu_flags": hashlib.sha256(flags[1].encode()).hexdigest()[:12] if flags else "",
        "torch": torch.__version__,
        "implementation": chosen[0],
        "threads": 1,
    }


def curve(directory, name):
    config = tiny.config(
        directory, steps=STEPS, context=128, tokens_per_step=512, out=f"{directory}/{name}",
        **ARMS[name],
    )  # fmt: skip
    trainer = Trainer(config)
    memory = trainer.run()["activation_bytes"]
    trainer.close()
    return {"loss": [loss for _, loss, _ in tiny.losses(config.out)], "activation_bytes": memory}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARMS)
def test_golden_curve(tmp_path, name):
    golden = json.loads(FILE.read_text())
    assert set(golden["curves"]) == set(ARMS)
    want, got = golden["curves"][name], curve(tmp_path, name)
    assert len(got["loss"]) == len(want["loss"]) == STEPS
    if where() == golden["where"]:
        assert got == want
    else:
        off = [abs(a - b) > 0.05 * b for a, b in zip(got["loss"], want["loss"])]
        assert sum(off) <= 0.01 * STEPS, f"steps off by more than 5 %: {sum(off)}"
        assert got["activation_bytes"] == pytest.approx(want["activation_bytes"], rel=0.05)


def test_curves_tell_the_arms_apart():
    """Without this test nobody would notice a golden file whose arms are mixed up."""
    curves = {n: c["loss"] for n, c in json.loads(FILE.read_text())["curves"].items()}
    assert len({tuple(c) for c in curves.values()}) == len(ARMS)
    for name, losses in curves.items():
        assert losses[-1] < 0.75 * losses[0], name


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        curves = {name: curve(directory, name) for name in ARMS}
    FILE.write_text(json.dumps({"where": where(), "curves": curves}, indent=1) + "\n")
