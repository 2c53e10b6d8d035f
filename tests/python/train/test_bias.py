# SPDX-License-Identifier: Apache-2.0
"""``python -m sagebwd.train.bias``: the error of accumulated gradients, and the gradient noise."""

import json
from pathlib import Path

import pytest
import torch

import tiny
from sagebwd.train import bias, train
from test_compare import check_page

pytestmark = pytest.mark.slow

LIFTED = "lifted=vectorwise lift=S,O,S',dV,dP,dQ,dK"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bias")
    config = tiny.config(directory, steps=60, context=128, tokens_per_step=512, attention="fpa")
    train(config)
    arguments = [config.out, "--tokens", "2K,8K,32K", "--recipes", f"paper,vectorwise,{LIFTED}"]
    assert bias.main(arguments) == 0
    return Path(config.out), json.loads((Path(config.out) / "bias.json").read_text())


def errors(record, arm, projection):
    return [row["errors"][arm][projection]["all"] for row in record["rows"]]


def test_the_systematic_part_shows(record):
    _, record = record
    assert [row["tokens"] for row in record["rows"]] == [2048, 8192, 32768]
    for projection in ("Wq", "Wk", "Wv"):
        ours, paper = errors(record, "vectorwise", projection), errors(record, "paper", projection)
        assert max(ours) < 0.04
        assert paper[-1] > 2 * ours[-1]
    # Noise averages out: four times the tokens halve it. The bias of `paper` does not shrink.
    assert errors(record, "paper", "Wk")[-1] > 0.8 * errors(record, "paper", "Wk")[0]


def test_floating_point_has_no_error(record):
    _, record = record
    for projection in bias.PROJECTIONS:
        assert max(errors(record, "lifted", projection)) < 2e-5


def test_noise_shrinks_with_tokens(record):
    _, record = record
    for projection in bias.PROJECTIONS:
        noise = errors(record, "noise", projection)
        assert noise[-1] == pytest.approx(noise[0] / 4, rel=0.5)


def test_worst_layer_is_at_least_the_mean(record):
    _, record = record
    for row in record["rows"]:
        for arm in row["errors"].values():
            assert all(arm[p]["worst"] >= arm[p]["all"] for p in bias.PROJECTIONS)


def test_page_and_verdict(record):
    out, record = record
    text = (out / "bias.html").read_text()
    check_page(text)
    assert "Does the gradient error average out?" in text
    assert "`vectorwise`" in bias.verdict(record)


def test_rows_are_kept_as_they_come(record, tmp_path, monkeypatch):
    run, _ = record
    add, calls = bias.Measurement.add, []

    def interrupted(self, rows):
        calls.append(rows)
        if len(calls) > 3:  # two parts make the first row
            raise KeyboardInterrupt
        add(self, rows)

    monkeypatch.setattr(bias.Measurement, "add", interrupted)
    words = [str(run), "--tokens", "2K,8K", "--recipes", "paper", "--out", str(tmp_path)]
    assert bias.main(words) == 130
    kept = json.loads((tmp_path / "bias.json").read_text())
    assert [row["tokens"] for row in kept["rows"]] == [2048]


def test_scatter():
    """Compared with the known value for parts with a common mean and a given deviation."""
    g = torch.Generator().manual_seed(0)
    parts = torch.randn(200, 300, generator=g) * 2 + 1
    squares, whole = parts.square().sum().item(), parts.sum(0).square().sum().item()
    assert bias.scatter(squares, whole, 200) == pytest.approx(200 * 4 * 300, rel=0.05)


def test_refusals(tmp_path, capsys):
    assert bias.main([str(tmp_path)]) == 2
    assert "neither a checkpoint nor a run" in capsys.readouterr().err
