# SPDX-License-Identifier: Apache-2.0
"""Every script of examples/ runs as its first lines say, learns, and is short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
NEEDS = dict(
    transformers_trainer=["transformers"], trl_packing=["trl", "datasets"],
    accelerate_fsdp2=["accelerate"], lightning_module=["lightning"],
    torchtitan_override=["torchtitan"], megatron_core=["megatron.core"],
    diffusers_lora=["diffusers", "peft"], wan_sla2=["diffusers"], rl_logits=["transformers"],
)  # fmt: skip
LONG = (
    "lightning_module", "torchtitan_override", "megatron_core",  # need other packages
    "accelerate_fsdp2", "context_parallel", "rl_logits", "trl_packing", "wan_sla2",
)  # fmt: skip
RANKS = dict(accelerate_fsdp2=2, context_parallel=2, megatron_core=1)


def run(script, tmp_path):
    command = [sys.executable]
    if script in RANKS:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS[script])]
    if script == "megatron_core":  # it takes a GPU for granted
        command.append(str(ROOT / "tests/python/megatron_on_cpu.py"))
    done = subprocess.run(
        [*command, str(SCRIPTS[script])], capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tier(script):
    long = script in LONG
    return pytest.param(script, marks=pytest.mark.long if long else pytest.mark.slow)


@pytest.mark.cpu_only
@pytest.mark.parametrize("script", [tier(script) for script in SCRIPTS])
def test_script(script, tmp_path):
    for name in NEEDS.get(script, []):
        pytest.importorskip(name)
    out = run(script, tmp_path)
    assert "nan" not in out.lower()
    losses = [float(x) for x in re.findall(r"'?loss'?:? '?([\d.]+)", out)]
    if script == "rl_logits":
        spread = dict(re.findall(r"^(\S+) .*deviation ([\d.]+)", out, re.M))
        assert max(float(spread["sdpa"]), float(spread["sagebwd"])) < 1e-4, out
        assert 1e-4 < float(spread["paper"]) < 0.3, out
        assert "sagebwd    attention alone: 0 of 32768 values differ" in out
    elif script == "wan_sla2":
        assert "latents (1, 4, 4, 32, 32)" in out and len(losses) == 5
    elif script == "diffusers_lora":  # LoRA of random weights learns little
        assert "40 calls ran here" in out and len(losses) == 10
    else:
        assert len(losses) >= 2 and losses[-1] < losses[0], out
    if script == "accelerate_fsdp2":
        assert "DTensor" in out
    if script == "lightning_module":
        assert "32 calls ran here" in out


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_short(script):
    lines = [line for line in SCRIPTS[script].read_text().splitlines() if line.strip()]
    assert 15 <= len(lines) <= 40


def test_the_page_has_every_script():
    page = (ROOT / "docs/stacks.md").read_text()
    for path in (ROOT / "examples").iterdir():
        assert f"](../examples/{path.name})" in page, path.name
