# SPDX-License-Identifier: Apache-2.0
"""Mistyped words of the Python commands get a suggestion."""

import pytest

from sagebwd.suggest import did_you_mean
from sagebwd.tools import bench
from sagebwd.train.__main__ import main
from sagebwd.train.config import from_dict, preset
from sagebwd.train.errors import BadInput


def test_near_words_only():
    known = ("paper", "vectorwise")
    assert did_you_mean("vectorwize", known) == "; did you mean 'vectorwise'?"
    assert did_you_mean("Paper", known) == "; did you mean 'paper'?"
    assert did_you_mean("fp4", known) == ""


@pytest.mark.parametrize(
    "arguments, near",
    [
        (["--recipie", "paper"], "'--recipe'"),
        (["--preset", "dmo"], "'demo'"),
        (["--recipe", "papper"], "'paper'"),
        (["--compare", "fpa,vectorwize"], "'vectorwise'"),
    ],
)
def test_the_trainer_suggests(arguments, near, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert f"did you mean {near}?" in capsys.readouterr().err


def test_fields_presets_and_cases_suggest():
    with pytest.raises(BadInput, match="did you mean 'warmup'"):
        from_dict({"warm_up": 3})
    with pytest.raises(BadInput, match="did you mean 'demo'"):
        preset("demoo")
    with pytest.raises(ValueError, match="did you mean 'causal'"):
        bench.Case.parse("n64 casual")
    with pytest.raises(SystemExit):
        bench.main(["--round", "3", "--thread", "1", "--jsno", "x"])
