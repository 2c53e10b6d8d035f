# SPDX-License-Identifier: Apache-2.0
"""Compare mode and its report."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tiny
from sagebwd.train import train
from sagebwd.train.compare import compare, parse_arms, report_runs
from sagebwd.train.errors import BadInput


class Tags(HTMLParser):
    """Fails on tags that do not close; keeps what refers to something outside the page."""

    VOID = {"meta", "line", "path", "circle"}

    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def check_page(text):
    parser = Tags()
    parser.feed(text)
    assert parser.open == [] and parser.links == []
    assert "http" not in text and "nan" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    config = tiny.config(
        tmp_path_factory.mktemp("compare"), steps=12, eval_every=4, audit_every=3, sample_tokens=5
    )
    arms = "fpa,paper,vectorwise,two=vectorwise smooth_k=off lift=dQ,dK"
    return config, compare(config, arms, ["--compare", arms])


def test_arms_are_what_a_single_run_is(compared, tmp_path):
    config, runs = compared
    alone = tiny.config(tmp_path, steps=12, recipe="paper", data=config.data)
    train(alone)
    assert tiny.losses(alone.out) == tiny.losses(Path(config.out) / "paper")
    assert [r.name for r in runs] == ["fpa", "paper", "vectorwise", "two"]
    assert runs[3].config["recipe"] == "vectorwise smooth_k=off lift=dQ,dK"


def test_report(compared):
    config, runs = compared
    text = (Path(config.out) / "report.html").read_text()
    check_page(text)
    for words in ("Difference to full precision", "Errors by layer", "Gradient audit",
                  "Sample text", "kept per sequence", "prefers-color-scheme: dark"):  # fmt: skip
        assert words in text
    for run in runs:
        assert f"{run.eval_loss:.4f}" in text
    figures = json.loads((Path(config.out) / "report.json").read_text())
    assert [len(r["log"]) > 12 for r in figures["runs"]] == [True] * 4
    layers = figures["layers"]
    assert set(layers) == {"paper", "vectorwise", "two"}
    assert layers["vectorwise"][1]["errors"]["dQ"] < layers["paper"][1]["errors"]["dQ"]


def test_a_finished_comparison_is_not_trained_again(compared, capsys):
    from dataclasses import replace

    config, runs = compared
    again = compare(replace(config, resume="auto"), "fpa,paper")
    assert "step" not in capsys.readouterr().out.split("arms")[1].split("attention")[0].replace(
        "in step", ""
    )
    assert again[0].eval_loss == runs[0].eval_loss
    with pytest.raises(BadInput, match="holds a run"):
        compare(config, "fpa,paper")


def test_report_of_single_runs(compared, capsys):
    config, _ = compared
    page = report_runs([Path(config.out) / "fpa", Path(config.out) / "two"])
    check_page(page.read_text())
    assert "two" in capsys.readouterr().out
    with pytest.raises(BadInput, match="not the directory of a finished run"):
        report_runs([Path(config.data).parent])


def test_an_arm_that_blows_up_does_not_stop_the_others(tmp_path, capsys):
    config = tiny.config(tmp_path, steps=6, clip=0.0, warmup=0)
    runs = compare(config, "fpa,wild=fpa lr=1e20 qk_norm=no")
    assert [r.name for r in runs] == ["fpa"]
    assert "wild did not finish: step" in capsys.readouterr().out


def test_switches_of_the_recipe_and_fields_are_words(tmp_path):
    text = "vectorwise rounding=dither:dQ,dK lr=1e-3,paper lift=dQ,dK, twice=fpa seed=1,"
    text += "off=vectorwise smooth_k=off"
    arms = parse_arms(text, tiny.config(tmp_path))
    assert list(arms) == ["vectorwise", "paper", "twice", "off"]
    assert arms["off"].recipe == "vectorwise smooth_k=off"
    assert arms["vectorwise"].recipe == "vectorwise rounding=dither:dQ,dK"
    assert arms["vectorwise"].lr == 1e-3
    assert arms["paper"].recipe == "paper lift=dQ,dK"
    assert (arms["twice"].attention, arms["twice"].seed) == ("fpa", 1)


def test_refusals(tmp_path, monkeypatch):
    config = tiny.config(tmp_path)
    for text, words in (
        ("fpa,int4", "expected an arm of"),
        ("fpa,vectorwize", "did you mean 'vectorwise'"),
        ("paper roundin=dither", "did you mean 'rounding'"),
        ("paper rounding=diter", "did you mean 'dither'"),
        ("fpa,fpa", "two arms are named"),
        ("paper rounding", "expected field=value"),
        ("paper:rounding=dither", "changes are words"),
        ("fpa rounding=dither", "fpa has no recipe"),
        ("paper rounding=dither:dP", "expected 'nearest', 'dither' or 'dither:' with names"),
        ("paper colour=red", "no field is named"),
        ("", "no arms"),
        ("..=fpa", "name of its directory"),
        ("../up=fpa", "name of its directory"),
        ("a/b=fpa", "name of its directory"),
        ("/tmp/x=fpa", "name of its directory"),
        (".hidden=fpa", "name of its directory"),
        ("a..b=fpa", "name of its directory"),
        ("a\nb=fpa", "expected an arm of"),
        ("x" * 300 + "=fpa", "name of its directory"),
        ("paper out=/tmp/x", "out is the same for all arms"),
        ("paper data=other.txt", "data is the same for all arms"),
        ("paper qk_norm=perhaps", "qk_norm: expected a value of type bool"),
    ):
        with pytest.raises(BadInput, match=words):
            parse_arms(text, config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="one process"):
        compare(config, "fpa")
