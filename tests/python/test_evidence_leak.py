# SPDX-License-Identifier: Apache-2.0
"""The demonstration of what shared scales tell a model about later tokens."""

import json

import pytest
import torch

from sagebwd.evidence import __main__ as program
from sagebwd.evidence import leak

pytestmark = pytest.mark.cpu_only


def test_writes_a_record_and_a_page(tmp_path, capsys):
    assert program.main(["leak", "--out", str(tmp_path), "--steps", "3"]) in (0, None)
    figures = json.loads((tmp_path / "leak.json").read_text())
    assert [row["arm"] for row in figures["rows"]] == [arm.name for arm in leak.ARMS]
    assert all(len(row["curve"]) == 3 for row in figures["rows"])
    planted = {row["arm"]: row["planted_length"] for row in figures["rows"]}
    assert planted["vectorwise"] == planted["tokenwise"] > 100
    page = (tmp_path / "leak.html").read_text()
    assert "tokenwise" in page and "What had to be planted" in page
    assert str(tmp_path / "leak.html") in capsys.readouterr().out


def test_says_what_is_wrong_with_its_arguments(tmp_path, capsys):
    assert program.main(["leak", "--out", str(tmp_path), "--steps", "0"]) == 2
    assert "steps: expected 1 or more" in capsys.readouterr().err


def test_no_model_beats_the_best_causal_predictor_with_exact_attention():
    arm = leak.Arm("exact", leak._exact, "", layers=1, steps=40)
    row = leak.run(arm, arm.steps, lambda text: None)
    assert row["above_best"] > -0.01 * leak._entropy()
    assert leak.verdict(row) == "learnt nothing about the future"


@pytest.mark.slow
def test_learns_the_future_through_shared_scales_and_not_through_scales_of_tokens():
    torch.set_num_threads(2)
    arms = {arm.name: arm for arm in leak.ARMS}
    shared, own = (
        leak.run(arms[name], 300, lambda text: None) for name in ("vectorwise", "tokenwise")
    )
    assert leak.verdict(shared).startswith("reads the future")
    assert shared["above_best_exact"] > 0.01  # gone, and worse than knowing nothing
    assert leak.verdict(own) == "learnt nothing about the future"
    assert abs(own["above_best"]) < 1e-3
