# SPDX-License-Identifier: Apache-2.0
"""``python -m sagebwd.train.layers``: errors of every layer of a checkpoint."""

from pathlib import Path

import pytest

import tiny
from sagebwd.train import layers, train
from sagebwd.train.head import slice_rows
from sagebwd.train.tensor_file import read_tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny.config(tmp_path_factory.mktemp("layers"), steps=30, context=128, micro_batch=2)
    train(config)
    return config.out


def test_layers(run, tmp_path, capsys):
    captures = tmp_path / "captures.safetensors"
    arms = "paper,vectorwise,lifted=vectorwise lift=S,O,S',dV,dP,dQ,dK"
    assert layers.main([run, "--arms", arms, "--captures", str(captures), "--tokens", "100"]) == 0
    text = capsys.readouterr().out
    assert text.count("max logit") == 3
    assert read_tensors(captures)["layer.1.q"].shape == (1, 2, 100, 32)
    reports = layers.layer_errors(run, arms)
    for paper, ours, lifted in zip(*(reports[n].layers for n in ("paper", "vectorwise", "lifted"))):
        assert lifted.errors["dK"] < 1e-5 < ours.errors["dK"] < paper.errors["dK"]
    assert len(reports["paper"].layers) == 2


def test_refusals(tmp_path, run, capsys):
    assert layers.main([str(tmp_path)]) == 2
    assert layers.main([run, "--data", str(tmp_path / "none.bin")]) == 2
    assert "does not exist" in capsys.readouterr().err
    state = sorted(Path(run, "checkpoints").iterdir())[-1] / "state.json"
    state.write_text(state.read_text()[:-20])
    assert layers.main([run]) == 2
    assert "state.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tokens, vocab, rows",
    [(65536, 50304, 4096), (4096, 256, 4096), (65536, 256, 65536), (7919, 50304, 3960)],
)
def test_slices_of_the_head_are_equal(tokens, vocab, rows):
    assert slice_rows(tokens, vocab) == rows
