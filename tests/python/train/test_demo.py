# SPDX-License-Identifier: Apache-2.0
"""The demo, small: one page with training, noise, accuracy and bias."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from sagebwd.train import demo, flops
from sagebwd.train.errors import BadInput
from sagebwd.train.report import read_runs

pytestmark = pytest.mark.slow
BINARY = Path(os.environ.get("SAGEBWD_BIN", Path(__file__).parents[3] / "build/bin/sagebwd"))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    out = directory / "out"
    record = directory / "hard.json"
    assert BINARY.exists(), f"{BINARY} is missing: build the project, or set SAGEBWD_BIN"
    page = ["--html", directory / "hard.html", "--json", record]
    env = {**os.environ, "SAGEBWD_PYTHON": sys.executable}
    subprocess.run([BINARY, "report", "--quick", *page], check=True, env=env)
    before, demo._BIAS = demo._BIAS, {k: (v[0], "512,1K") for k, v in demo._BIAS.items()}
    try:
        code = demo.main([
            "--accuracy", str(record), "--out", str(out), "--preset", "nano",
            "--steps", "20", "--eval-every", "5", "--eval-tokens", "1K", "--context", "64",
            "--tokens-per-step", "256", "--data", tiny.write_text(directory), "--threads", "1",
            "--device", "cpu",
        ])  # fmt: skip
    finally:
        demo._BIAS = before
    assert code == 0
    return out


def test_one_page_tells_the_story(shown):
    text = (shown / "report.html").read_text()
    for words in ("The error bar is measured", "Difference to full precision",
                  "Speed of whole training steps", "Two equal runs differ by",
                  "Accuracy on easy and hard inputs", "Does the gradient error average out?",
                  'href="../hard.html"'):  # fmt: skip
        assert words in text, words
    assert "MFU" not in text
    assert set(json.loads((shown / "report.json").read_text())["bias"]["rows"][0]["errors"]) == {
        "paper", "vectorwise", "noise"
    }  # fmt: skip


def test_the_noise_is_measured_by_a_run_that_does_the_same_work(shown):
    fpa, again = read_runs([shown / "fpa", shown / "fpa-again"])
    differing = {k for k in fpa.config if fpa.config[k] != again.config[k]}
    assert differing == {"seed", "data_seed", "out"}


def test_no_mfu_without_a_stated_peak(shown):
    import torch

    rate, why = flops.peak(torch.device("cpu"), torch.float32)
    assert rate is None and "no stated peak" in why
    (run,) = read_runs([shown / "fpa"])
    assert [e["mfu"] for e in run.of("step")] == [None] * 20


def test_a_console_line_has_no_share_of_an_unknown_peak(tmp_path, capsys):
    from sagebwd.train import train

    train(tiny.config(tmp_path, steps=2, log_every=1))
    said = capsys.readouterr().out
    assert re.search(r"no MFU, a CPU has no stated peak", said)
    assert "% MFU" not in said and "tok/s" in said


def test_a_record_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(BadInput, match="missing.json cannot be read"):
        demo.keep_accuracy(tmp_path / "missing.json", tmp_path)
    assert demo.main(["--accuracy", str(tmp_path / "no.json"), "--out", str(tmp_path)]) == 2
