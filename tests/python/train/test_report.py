# SPDX-License-Identifier: Apache-2.0
"""What a report says of runs: noise, verdict, charts, and what it leaves out."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from sagebwd.pages import html, svg
from sagebwd.train.config import Config
from sagebwd.train.report import Run, noise, write_report
from sagebwd.train.report.verdict import noise_words, plain_table, speed_words, verdict
from test_compare import check_page


def make_run(name, attention="fpa", final=2.0, wander=0.0, speed=1000.0, steps=100, **config):
    """A run whose losses fall to ``final``; ``wander`` is how far held-out losses are from it."""
    fields = {**json.loads(Config().to_json()), "attention": attention, **config}
    rng = random.Random(name)
    log = []
    for step in range(1, steps + 1):
        loss = final + 3 * math.exp(-step / 15)
        log.append({"kind": "step", "step": step, "loss": loss + 1e-3 * rng.gauss(0, 1),
                    "tokens_per_second": speed * rng.uniform(0.99, 1.01), "mfu": None,
                    "seconds": float(step)})  # fmt: skip
        if step % 10 == 0:
            log.append({"kind": "eval", "step": step, "loss": loss + wander, "seconds": 1.0})
    summary = {
        "eval_loss": final + wander, "tokens_per_second": speed, "parameters": 1_000_000,
        "tokens": steps * 4096, "machine": "a machine", "torch": "2", "data": "abc",
    }  # fmt: skip
    return Run(name, fields, summary, log)


def report(tmp_path, runs, **more):
    path = tmp_path / "report.html"
    write_report(runs, path, **more)
    check_page(path.read_text())
    return path.read_text()


# --- noise


def test_repeats_differ_in_seeds_or_rounding_alone():
    base = make_run("fpa")
    again = make_run("again", seed=1, data_seed=3)
    split = make_run("split", micro_batch=2)
    rounded = make_run("rounded", lr=base.config["lr"] * (1 + 1e-6))
    other = make_run("other", lr=2 * base.config["lr"])
    int8 = make_run("paper", "sagebwd")
    runs = [base, again, split, rounded, other, int8]
    assert [r.name for r in noise.repeats_of(runs)] == ["again", "split", "rounded"]
    assert [r.name for r in noise.compared_with(runs)] == ["other", "paper"]


def test_noise_is_the_distance_of_repeats_late_in_training():
    base, again = make_run("fpa"), make_run("again", wander=0.02, seed=1, speed=970.0)
    found = noise.noise_of([base, again])
    assert found.apart == pytest.approx(0.02) and found.loss == found.apart
    assert found.speed == pytest.approx(0.03)
    close = noise.noise_of([base, make_run("again", wander=1e-6, seed=1)])
    assert close.loss == noise.LEAST  # two runs that agree by chance prove no such precision
    assert noise.noise_of([base]).speed is None


def test_speed_of_unequal_work_is_no_noise():
    runs = [make_run("fpa"), make_run("split", micro_batch=2, speed=500.0)]
    assert noise.noise_of(runs).speed is None


def test_paired_difference_has_an_honest_interval():
    base, run = make_run("fpa"), make_run("x", "sagebwd", final=2.01)
    mean, bar = noise.late_mean(run, base)
    assert abs(mean - 0.01) < bar < 0.002
    for entry in run.log:  # a slow wave is not averaged away by counting every step
        if entry["kind"] == "step":
            entry["loss"] += 0.02 * math.sin(entry["step"] / 8)
    assert noise.late_mean(run, base)[1] > 0.01
    assert noise.late_mean(make_run("short", steps=6), make_run("fpa", steps=6)) is None


def test_the_page_says_what_differs(tmp_path):
    fpa, int8 = make_run("fpa"), make_run("paper", "sagebwd", recipe="paper")
    assert "only the attention differs" in report(tmp_path, [fpa, int8])
    other = make_run("fast", "sagebwd", lr=0.1)
    text = report(tmp_path, [fpa, int8, other])
    assert "differ in lr." in text and "only the attention differs" not in text


# --- words


def test_verdict_holds_differences_against_the_noise():
    fpa, again = make_run("fpa"), make_run("again", wander=0.02, seed=1)
    say = lambda *losses: verdict(
        [fpa, again, *(make_run(f"r{i}", "sagebwd", loss) for i, loss in enumerate(losses))]
    )
    assert say(2.015) == "`r0` (+0.0150) is within the noise of full precision (± 0.0200)."
    assert "`r0` (+0.0150) and `r1` (−0.0100) are within" in say(2.015, 1.99)
    assert "behind full precision, beyond the noise" in say(2.03)
    assert "ahead of full precision, beyond the noise" in say(1.97)
    words = noise_words([fpa, again, make_run("r", "sagebwd")])
    assert "0.0200 apart" in words and "does not prove them equal" in words
    alone = noise_words([fpa, make_run("r", "sagebwd")])
    assert "No second full-precision run measured the noise" in alone
    assert verdict([fpa]) == "Nothing to compare with."


def test_speed_has_an_error_bar():
    fpa, again = make_run("fpa"), make_run("again", seed=1, speed=950.0)
    say = lambda speed: speed_words([fpa, again, make_run("r", "sagebwd", speed=speed)])
    assert "0.97× ± 0.05 (no difference seen)" in say(970.0)
    assert "0.80× ± 0.05 (slower)" in say(800.0)
    assert "Two equal runs differ by 5.0 %" in say(970.0)
    table = plain_table([fpa, again, make_run("r", "sagebwd", speed=970.0)])
    assert "0.97× ± 0.05" in table and "± 0.0050" in table


# --- page


def test_differences_are_readable_where_curves_coincide(tmp_path):
    fpa, int8 = make_run("fpa"), make_run("paper", "sagebwd", final=2.0005)
    int8.log[0]["loss"] += 1.0  # an early step far off must not set the scale
    int8.log[10]["loss"] += 1.0
    text = report(tmp_path, [fpa, make_run("again", wander=0.01, seed=1), int8])
    charts = dict(re.findall(r'aria-label="([^"]*)"(.*?)</figure>', text, flags=re.S))
    fine = charts["paper: training loss minus that of fpa"]
    ticks = [float(t.replace("−", "-")) for t in re.findall(r'x="58.0".*?>([−\d.]+)<', fine)]
    assert max(ticks) < 0.01 and min(ticks) < 0
    assert 'class="band"' in fine
    assert 'class="band"' in charts["Held-out loss minus that of fpa"]
    assert "Held-out loss minus that of fpa, finer" in charts


def test_sample_text_is_shown_only_where_it_is_worth_reading(tmp_path):
    def page(loss, text):
        run = make_run("fpa", final=loss, sample_tokens=20, prompt="def ")
        run.log.append({"kind": "sample", "step": 100, "text": text})
        return report(tmp_path, [run])

    gibberish = "def " + "xq;z" * 5
    assert gibberish not in page(2.6, gibberish) and "not words" in page(2.6, gibberish)
    assert "def name(self):" in page(1.1, "def name(self): return")
    # Tokens of four characters: 4.4 nats a token are 1.1 a character.
    assert "word" in re.search(r"<pre>(.*)</pre>", page(4.4, "def " + "word" * 20))[1]


def test_accuracy_and_bias_are_on_the_page(tmp_path):
    cases = [
        {"recipe": r, "lift": "", "inputs": kind, "sigma": s, "n": 64, "d": 8, "heads": 1,
         "tensors": {t: {"rel_l2": error * s} for t in ("dQ", "dK", "dV")}}
        for r, error in (("paper", 0.15), ("vectorwise", 0.02))
        for kind, s in (("gaussian", 1), ("gaussian", 3), ("sink", 1))
    ]  # fmt: skip
    errors = lambda e: {
        p: {"all": e, "worst": e, "worst_layer": 0} for p in ("Wq", "Wk", "Wv", "Wo")
    }
    bias = {"rows": [
        {"tokens": n,
         "errors": {"paper": errors(e), "vectorwise": errors(0.01), "noise": errors(0.4)}}
        for n, e in ((8192, 0.1), (65536, 0.2))
    ]}  # fmt: skip
    runs = [make_run("fpa"), make_run("paper", "sagebwd")]
    path = tmp_path / "report.html"
    write_report(runs, path, accuracy={"cases": cases, "page": "../report.html"}, bias=bias)
    text = path.read_text()
    assert 'href="../report.html"' in text and "sink, first key" in text and "15%" in text
    assert "Does the gradient error average out?" in text
    assert "grows from 10% to 20%" in text and "stays near 1.0%" in text
    figures = json.loads((tmp_path / "report.json").read_text())
    assert figures["accuracy"]["cases"] and figures["bias"]["rows"] and figures["noise"]["loss"]


def test_figures_stay_json_where_numbers_are_not_finite(tmp_path):
    run = make_run("fpa")
    run.log[3]["loss"] = math.nan
    run.summary["peak"] = math.inf
    report(tmp_path, [run, make_run("paper", "sagebwd")])

    def refuse(word):
        raise AssertionError(word)

    figures = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert figures["runs"][0]["log"][3]["loss"] == "NaN"


def test_the_style_is_a_file_of_the_package():
    root = Path(__file__).resolve().parents[3]
    assert html.STYLE == (root / "python/sagebwd/pages/report.css").read_text(encoding="utf-8")
    for name in [*html.NAMED, *(f"other{i + 1}" for i in range(html.OTHERS))]:
        assert f".c-{name} " in html.STYLE


# --- charts


def test_ticks_and_text():
    assert svg.ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert svg.ticks(2.73, 4.13)[0] <= 2.73 and svg.ticks(2.73, 4.13)[-1] >= 4.13
    assert svg.log_ticks(0.011, 0.4) == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.5])
    assert svg.number(5000) == "5000" and svg.number(2_097_152) == "2.097M"
    assert svg.number(0.0001) == "0.0001" and svg.number(-0.5) == "−0.5"
    assert svg.share(0.154) == "15%" and svg.share(0.0207) == "2.1%" and svg.share(0.001) == "0.10%"
    chart = svg.Chart("flat & <odd>", "x", [svg.Line("a", "fpa", [(1, 2.0), (1, float("nan"))])])
    text = svg.to_svg(chart)
    assert "nan" not in text and "&lt;odd&gt;" in text
    assert html.prose("`<b>` & `paper`", {"paper": "paper"}) == (
        '<code>&lt;b&gt;</code> &amp; <code class="arm c-paper">paper</code>'
    )
    flat = [(x, 1.0) for x in range(50)]
    assert [y for _, y in svg.smoothed(flat)] == pytest.approx([1.0] * 50)
    assert svg.thinned(flat, 10)[-1] == (49, 1.0) and len(svg.thinned(flat, 10)) <= 10
    assert noise.running_mean(flat)[7] == (7, pytest.approx(1.0), 0.0)


def test_bars_grow_with_their_values():
    chart = svg.Bars("hard", ["sink", "long"], [("a", "paper", [0.1, 0.2])])
    widths = [
        float(w)
        for w in re.findall(r'rect class="bar".*? width="([\d.]+)"', svg.bars_to_svg(chart))
    ]
    assert widths[1] == pytest.approx(2 * widths[0])


# --- labels of charts -----------------------------------------------------------------------------


def test_neighbouring_ticks_have_different_labels():
    axes = [(4.1551, 4.1649), (-0.00012, 0.00013), (0, 3e-9), (1.23456e6, 1.23458e6), (5, 5)]
    for values in (*(svg.ticks(*ends) for ends in axes), svg.log_ticks(0.01, 3)):
        labels = list(svg.tick_labels(values).values())
        assert len(set(labels)) == len(values), labels
    assert list(svg.tick_labels([4.16, 4.162, 4.164]).values()) == ["4.160", "4.162", "4.164"]
    assert list(svg.tick_labels([0, 0.5, 1]).values()) == ["0", "0.5", "1"]


def test_labels_of_bars_are_inside_the_picture():
    names = ["sink", "delimiters everywhere", "outliers everywhere, and more of them"]
    text = svg.bars_to_svg(svg.Bars("t", names, [("a", "fpa", [0.1, 0.2, 0.3])]))
    for name in names:
        (place,) = re.findall(rf'x="([\d.]+)" y="[\d.]+" text-anchor="end">{name}<', text)
        assert float(place) >= 6.5 * len(name), "12 px letters are up to 6.5 wide on average"
