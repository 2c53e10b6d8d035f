# SPDX-License-Identifier: Apache-2.0
"""Configuration: presets, refusals, schedule, batches."""

import json
import math
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import tiny
from sagebwd.train import Config, Trainer, errors, preset, train
from sagebwd.train.__main__ import main
from sagebwd.train.attend import Clock, dither_seed, make_attend
from sagebwd.train.batch_plan import plan_batch
from sagebwd.train.config import FIELDS, check, count, from_dict, upgraded
from sagebwd.train.errors import EXIT_CODES, BadInput
from sagebwd.train.flops import per_token
from sagebwd.train.model import Llama
from sagebwd.train.presets import PRESETS
from sagebwd.train.schedule import learning_rate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound(name):
    config = preset(name)
    check(config)
    plan = plan_batch(config, 1, CUDA)
    assert plan.micro * plan.accumulate * config.context == config.tokens_per_step
    with torch.device("meta"):
        model = Llama(config, 50257)
    parameters = sum(p.numel() for p in model.parameters())
    if name in ("18m", "45m", "124m", "325m"):
        assert parameters == pytest.approx(1e6 * int(name[:-1]), rel=0.05)
    assert per_token(config, 50304) > 6 * (parameters - 50304 * config.width)


def test_the_published_model():
    config = preset("325m")
    assert (config.width, config.layers, config.heads, config.head_dim) == (1024, 20, 16, 64)
    assert (config.ffn, config.context, config.tokens_per_step) == (3072, 4096, 2**21)
    assert config.steps * config.tokens_per_step == pytest.approx(78e9, rel=0.01)


@pytest.mark.parametrize(
    "text, value",
    [("2.1M", 2**21), ("2M", 2**21), ("260K", 2**18), ("16K", 2**14), ("1M", 2**20), ("512", 512),
     ("262_144", 2**18), ("100K", 102_400)],
)  # fmt: skip
def test_counts(text, value):
    assert count(text) == value


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(heads=3), "heads: expected a divisor"),
        (dict(heads=16), "head dim: expected a multiple of 8"),
        (dict(kv_heads=3, heads=2), "kv_heads: expected a divisor"),
        (dict(tokens_per_step=1000), "expected a multiple of the context 128, got 1000; 1024"),
        (dict(steps=0), "steps: expected at least 1"),
        (dict(lr=0.0), "lr: expected a positive"),
        (dict(recipe="paper lift=dX"), "expected names of"),
        (dict(warmup=-1), "warmup: expected 0 or more"),
        (dict(recipe="paper tile=65x64"), "tile_q: expected 0 or a multiple of 64 up to 256"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(BadInput, match=words):
        check(preset("nano", **changes))


NUMBERS = [n for n, f in FIELDS.items() if f.type in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e400", "infK", "9" * 30])
def test_numbers_that_are_none(name, value, capsys):
    """Every number among the options, from the command line: exit code 2 and its name."""
    if value == "9" * 30 and FIELDS[name].type is float:
        return  # a large number, and finite
    assert main(["--preset", "nano", f"--{name.replace('_', '-')}={value}"]) == 2
    assert f"{name}: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value",
    [("beta1", "5"), ("beta1", "1"), ("beta2", "1.0"), ("eps", "0"), ("lr", "0"), ("min_lr", "1.5"),
     ("rope_base", "0"), ("threads", "100000"), ("log_every", "0"), ("eval_tokens", "0"),
     ("unpack_limit", "0"), ("data_seed", str(2**63)), ("steps", "2.5"), ("out", "")],
)  # fmt: skip
def test_numbers_out_of_range(option, value, capsys):
    assert main(["--preset", "nano", f"--{option.replace('_', '-')}={value}"]) == 2
    assert f"{option}: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(lr=True), "lr: expected a value of type float"),
        (dict(data=None), "data: expected a value of type str"),
        (dict(steps=True), "steps: expected a value of type int"),
        (dict(steps=float("inf")), "steps: expected a value of type int"),
        (dict(tied="perhaps"), "tied: expected a value of type bool"),
    ],
)
def test_values_of_another_type(values, words):
    with pytest.raises(BadInput, match=words):
        from_dict(values)
    with pytest.raises(BadInput, match=words):
        check(preset("nano", **values))


def test_choices_and_text_from_python():
    for changes in (dict(attention="int4"), dict(data="a\0b"), dict(prompt="\0")):
        with pytest.raises(BadInput, match=f"{next(iter(changes))}: expected"):
            check(preset("nano", **changes))


def test_exit_codes_are_documented():
    """docs/training.md has the table of errors.py, and no class has a code of its own."""
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M))
    assert {int(code): words.replace("`", "") for code, words in rows.items()} == EXIT_CODES
    codes = {kind.exit_code for kind in errors.RunError.__subclasses__()}
    assert codes == {2, 3, 4, 5, 6} and codes < set(EXIT_CODES)


def test_refusals_of_values():
    for values, words in (
        (dict(attention="int4"), "attention: expected one of fpa, sagebwd"),
        (dict(steps="many"), "steps: expected a value of type int"),
        (dict(colour="red"), "no field is named 'colour'"),
    ):
        with pytest.raises(BadInput, match=words):
            from_dict(values)
    with pytest.raises(BadInput, match="cannot be dealt to 3 ranks"):
        plan_batch(preset("nano"), 3, CPU)
    with pytest.raises(BadInput, match="micro_batch: expected a divisor of the 4"):
        plan_batch(preset("nano", micro_batch=3), 1, CPU)


def test_json_round_trip():
    config = preset("demo", recipe="paper lift=dQ", qk_norm=False, lr=1.25e-3)
    assert from_dict(json.loads(config.to_json())) == config


def test_equal_recipes_are_equal_in_a_configuration():
    config = from_dict(dict(recipe=" rounding=dither  paper smooth_k=on lift=dK,dQ"))
    assert config.recipe == config.describe_attention() == "paper rounding=dither lift=dQ,dK"
    assert config.make_recipe().text() == config.recipe


@pytest.mark.parametrize(
    "old, recipe",
    [
        (dict(rounding="nearest", smoothing="recipe", lift="", tile_q=0, tile_k=0), "vectorwise"),
        (dict(recipe="paper", rounding="dither"), "paper rounding=dither"),
        (dict(rounding="dither:dQ"), "vectorwise rounding=dither:dQ"),
        (dict(smoothing="none"), "vectorwise smooth_k=off"),
        (dict(smoothing="qk", recipe="paper"), "paper smooth_q=on"),
        (dict(smoothing="k", recipe="paper"), "paper"),
        (dict(lift="dQ, dK"), "vectorwise lift=dQ,dK"),
        (dict(tile_q=64, tile_k=128), "vectorwise tile=64x128"),
        (dict(recipe="paper", tile_k=128), "paper tile=128x128"),
    ],
    ids=str,
)
def test_configurations_of_older_versions(old, recipe):
    assert from_dict(upgraded(old)).recipe == recipe
    assert not set(upgraded(old)) & {"rounding", "smoothing", "lift", "tile_q", "tile_k"}
    with pytest.raises(BadInput, match="no field is named"):
        from_dict(dict(rounding="dither"))
    with pytest.raises(BadInput, match="smooth_q: expected False in recipe vectorwise"):
        upgraded(dict(smoothing="qk"))


def test_dither_of_one_matmul_draws_new_seeds():
    clock = Clock()
    attend = make_attend(Config(recipe="vectorwise rounding=dither:dQ"), 0, clock)
    q, k, v = (torch.randn(1, 40, 2, 32, requires_grad=True) for _ in range(3))
    grads = []
    for clock.step in (1, 1, 2):
        grads.append(torch.autograd.grad(attend(q, k, v).sin().sum(), (q, k, v)))
    first, again, next_step = grads
    for a, b, c, is_dq in zip(first, again, next_step, (True, False, False)):
        assert torch.equal(a, b) and torch.equal(a, c) != is_dq


def test_dither_seeds_differ():
    seeds = {
        dither_seed(s, step, micro, layer)
        for s in range(3) for step in range(20) for micro in range(5) for layer in range(8)
    }  # fmt: skip
    assert len(seeds) == 3 * 20 * 5 * 8
    assert all(0 <= s < 2**63 for s in seeds)


def test_schedule():
    config = preset("nano", steps=110, warmup=10, lr=1.0, min_lr=0.1)
    rates = [learning_rate(config, s) for s in range(110)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55)
    assert rates[109] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 0.99)))
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_help_and_bad_option(capsys, tmp_path):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for word in ("--tokens-per-step", "--attention", "torchrun", "Exit codes", "--resume"):
        assert word in text
    assert main(["--preset", "nano", "--tokens-per-step", "1000"]) == 2
    assert "1024 would do" in capsys.readouterr().err
    for content in (None, "{", "[1]", "[" * 100_000, '{"lr": NaN}'):
        path = tmp_path / "config.json"
        if content is not None:
            path.write_text(content)
        assert main(["--config", str(path)]) == 2
        assert re.search("config: |lr: ", capsys.readouterr().err)


def test_loggers_get_every_step(tmp_path, monkeypatch):
    seen = []

    class Stub:
        log = staticmethod(lambda values, step: seen.append((step, values)))
        finish = staticmethod(lambda: seen.append("finished"))

    stub = types.ModuleType("wandb")
    stub.init = lambda **options: seen.append(options["project"]) or Stub
    monkeypatch.setitem(sys.modules, "wandb", stub)
    board = types.ModuleType("torch.utils.tensorboard")
    scalars = []

    class Writer:
        def __init__(self, directory):
            scalars.append(directory)

        def add_scalar(self, name, value, step):
            scalars.append((name, step))

        def close(self):
            scalars.append("closed")

    board.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    train(tiny.config(tmp_path, steps=2, wandb="project", tensorboard=True))
    assert seen[0] == "project" and seen[-1] == "finished"
    assert [s for s, v in seen[1:-1] if "step/loss" in v] == [1, 2]
    assert ("step/grad_norm", 2) in scalars and ("eval/loss", 2) in scalars
    assert scalars[-1] == "closed"


def test_missing_loggers_are_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for changes in (dict(wandb="project"), dict(tensorboard=True)):
        name = next(iter(changes))
        with pytest.raises(BadInput, match=f"{name}: asked for, but it is not installed"):
            Trainer(tiny.config(tmp_path, **changes))
