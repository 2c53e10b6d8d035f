# SPDX-License-Identifier: Apache-2.0
"""What shared scales tell about later tokens: to a model, and in which attentions."""

import json

import pytest
import torch

from sagebwd.evidence import __main__ as program
from sagebwd.evidence import leak, leaks

pytestmark = pytest.mark.cpu_only


def test_writes_a_record_and_a_page(tmp_path, capsys):
    assert program.main(["leak", "--out", str(tmp_path), "--steps", "3"]) in (0, None)
    figures = json.loads((tmp_path / "leak.json").read_text())
    assert [row["arm"] for row in figures["rows"]] == [arm.name for arm in leak.ARMS]
    assert all(len(row["curve"]) == 3 for row in figures["rows"])
    planted = {row["arm"]: row["planted_length"] for row in figures["rows"]}
    assert planted["vectorwise"] == planted["paper"] > 80
    page = (tmp_path / "leak.html").read_text()
    assert "vectorwise" in page and "What had to be planted" in page
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
    shared, own = (leak.run(arms[name], 300, lambda text: None) for name in ("paper", "vectorwise"))
    assert leak.verdict(shared).startswith("reads the future")
    assert shared["above_best_exact"] > 0.01  # gone, and worse than knowing nothing
    assert leak.verdict(own) == "learnt nothing about the future"
    assert abs(own["above_best"]) < 1e-3


@pytest.mark.slow
def test_which_attentions_leak(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(leaks, "why_no_sage", lambda device: "it is not asked")
    assert program.main(["leaks", "--out", str(tmp_path), "--tokens", "70"]) in (0, None)
    said = capsys.readouterr().out
    assert "SageAttention is left out: it is not asked" in said
    rows = {r["attention"]: r for r in json.loads((tmp_path / "leaks.json").read_text())["rows"]}
    assert {name for name, row in rows.items() if not row["leaks"]} == {"`vectorwise`"}
    assert all(c["words"] == "not a bit" for c in rows["`vectorwise`"]["changes"].values())
    for name in ("`paper`", "FP8, a scale per head", "MXFP8"):
        row = rows[name]
        assert 0.001 < row["changes"]["ordinary"]["relative"] < 0.1, name
        assert 0.005 < row["error"] < 0.1, name
    # A tiny value vanishes beside a large one that shares its scale.
    assert rows["MXFP8"]["changes"]["TransformerEngine#3248"]["relative"] == 1
    assert rows["MXFP8"]["changes"]["NaN or Inf"]["relative"] is None


def test_codes_of_eight_bits_are_as_near_as_they_can_be():
    x = torch.randn(1, 2, 70, 64)
    for rounded in (leaks._fp8(x, (2, 3)), leaks._mx(x, 2), leaks._mx(x, 3)):
        assert rounded.shape == x.shape
        assert ((rounded - x).norm() / x.norm()).item() == pytest.approx(0.026, abs=0.006)
    tiny = torch.zeros(1, 1, 64, 1)
    tiny[0, 0, 40:] = 2.0**-30  # the second block of 32 has a scale of its own
    tiny[0, 0, 0] = 1
    assert torch.equal(leaks._mx(tiny, 2), tiny.double())


def test_refuses_too_few_tokens(tmp_path, capsys):
    assert program.main(["leaks", "--out", str(tmp_path), "--tokens", "8"]) == 2
    assert "tokens: expected 70 or more" in capsys.readouterr().err
