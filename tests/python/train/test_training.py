# SPDX-License-Identifier: Apache-2.0
"""Whole runs: reproducible, resumable to the bit, stopped before harm."""

import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
from sagebwd.train import Trainer, checkpoint, train
from sagebwd.train.errors import BadInput, NonFinite, NotSaved, Stopped


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(recipe="paper rounding=dither"),
        dict(attention="fpa"),
    ],
    ids=["vectorwise", "paper-dither", "fpa"],
)
def test_two_runs_are_equal(tmp_path, changes):
    """A hundred steps give the same bits twice."""
    runs = [tiny.config(tmp_path, steps=100, out=str(tmp_path / n), **changes) for n in "ab"]
    for config in runs:
        train(config)
    assert tiny.losses(runs[0].out) == tiny.losses(runs[1].out)
    assert tiny.weights(runs[0].out) == tiny.weights(runs[1].out)
    curve = [loss for _, loss, _ in tiny.losses(runs[0].out)]
    assert curve[-1] < 0.7 * curve[0], "it learns"


def test_seeds_are_apart(tmp_path):
    first = lambda **changes: _first_loss(tmp_path, **changes)
    assert first() == first()
    assert first(seed=1) != first()
    assert first(data_seed=1) != first()


def _first_loss(tmp_path, **changes):
    config = tiny.config(tmp_path, steps=1, out=str(tmp_path / "seeds"), overwrite=True, **changes)
    return train(config)["loss"]


def _arguments(config):
    flags = []
    for name in ("data", "out", "device", "threads", "eval_every", "context", "steps", "warmup",
                 "tokens_per_step", "save_every", "eval_tokens"):  # fmt: skip
        flags += ["--" + name.replace("_", "-"), getattr(config, name)]
    return ["--preset", "nano", "--deterministic", "--recipe", "vectorwise rounding=dither", *flags]


@pytest.mark.slow
def test_kill_and_resume(tmp_path):
    """kill -9 at a random moment of a real run, then resume: as if nothing had happened."""
    dithered = "vectorwise rounding=dither"
    config = tiny.config(tmp_path, steps=60, save_every=7, recipe=dithered, keep=3)
    straight = replace(config, out=str(tmp_path / "straight"))
    train(straight)
    process = subprocess.Popen(
        tiny.command(*_arguments(config)), stdout=subprocess.DEVNULL, env=tiny.environment()
    )
    log = Path(config.out) / "log.jsonl"
    deadline = time.time() + 60
    while time.time() < deadline and (not log.exists() or log.read_text().count('"step"') < 25):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    reached = tiny.losses(config.out)[-1][0]
    assert 7 <= reached < 60
    done = tiny.run(*_arguments(config), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert f"goes on after step {reached // 7 * 7}" in done.stdout or reached % 7 == 0
    assert tiny.losses(config.out) == tiny.losses(straight.out)
    assert tiny.weights(config.out) == tiny.weights(straight.out)


def test_resume_from_damage(tmp_path):
    """A corrupt byte in the newest checkpoint costs the steps since the one before, no more."""
    config = tiny.config(tmp_path, steps=12, save_every=4, keep=3)
    train(config)
    want, bits = tiny.losses(config.out), tiny.weights(config.out)
    newest = checkpoint.list_checkpoints(Path(config.out) / "checkpoints")[-1]
    path = newest / "weights.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    trainer = Trainer(replace(config, resume="auto"))
    assert trainer.step_count == 8
    trainer.run()
    trainer.close()
    assert tiny.losses(config.out) == want
    assert tiny.weights(config.out) == bits


def test_no_checkpoints(tmp_path):
    """For timings: writing the state of a large model takes longer than its steps."""
    config = tiny.config(tmp_path, steps=3, save_every=1, keep=0)
    assert train(config)["steps"] == 3
    assert not (Path(config.out) / "checkpoints").exists()
    with pytest.raises(Stopped, match="nothing is kept"):
        train(replace(config, time_limit=1e-9, overwrite=True))


def test_resume_refuses_another_run(tmp_path):
    config = tiny.config(tmp_path, steps=2)
    train(config)
    for change, word in (
        (dict(recipe="paper"), "recipe"),
        (dict(lr=1e-4), "lr"),
        (dict(data_seed=5), "data_seed"),
    ):
        with pytest.raises(BadInput, match=f"another configuration: {word}"):
            Trainer(replace(config, resume="auto", **change))
    other = tmp_path / "other.txt"
    other.write_text(tiny.text(seed=2))
    with pytest.raises(BadInput, match="other data"):
        Trainer(replace(config, resume="auto", data=str(other)))


def test_init_starts_from_the_weights_of_another_run(tmp_path):
    first = tiny.config(tmp_path, steps=12)
    train(first)
    second = replace(first, out=str(tmp_path / "second"), init=first.out, data_seed=5, steps=2)
    trainer = Trainer(second)
    assert trainer.step_count == 0 and not trainer.optimizer.state
    saved = checkpoint.load(checkpoint.find(first.out))[1]["weights"]
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p.detach(), saved[name]), name
    trainer.run()
    trainer.close()
    loss = lambda out, step: tiny.losses(out)[step][1]
    assert loss(second.out, 0) < 0.9 * loss(first.out, 0)
    # Going on after an interruption takes the run's own checkpoint, not the first weights again.
    again = Trainer(replace(second, resume="auto"))
    assert again.step_count == 2
    again.close()
    with pytest.raises(BadInput, match="init: .* does not fit the model"):
        Trainer(replace(second, out=str(tmp_path / "third"), ffn=256))
    with pytest.raises(BadInput, match="neither a checkpoint nor a run"):
        Trainer(replace(second, out=str(tmp_path / "third"), init=str(tmp_path / "none")))


def test_a_run_in_the_way_is_not_lost(tmp_path):
    config = tiny.config(tmp_path, steps=6, save_every=2, keep=9)
    train(config)
    with pytest.raises(BadInput, match="holds a run up to step 6; go on with --resume auto"):
        Trainer(replace(config, steps=4))
    assert len(list((Path(config.out) / "checkpoints").iterdir())) == 3
    shorter = replace(config, steps=4, overwrite=True)
    summary = train(shorter)
    assert summary["steps"] == 4
    assert checkpoint.load_newest(Path(config.out) / "checkpoints")[1]["step"] == 4
    # From a checkpoint in the middle, into the same directory.
    third = Path(config.out) / "checkpoints" / "step-00000002"
    train(replace(shorter, resume=str(third)))
    assert len(tiny.losses(config.out)) == 4


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_non_finite_stops_before_the_optimizer(tmp_path, what):
    config = tiny.config(tmp_path, steps=9)
    trainer = Trainer(config)
    trainer.start_clock()
    for _ in range(3):
        trainer.step()
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    if what == "loss":
        trainer.model.slice_loss = lambda x, w, t, s, g: (x.sum() * torch.nan, x, w)
    else:
        trainer.model.norm.gain.register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(NonFinite, match=f"step 4: {what}") as raised:
        trainer.step()
    trainer.close()
    assert raised.value.exit_code == 3
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]), "the optimizer has not moved"
    saved = Path(config.out) / "checkpoints" / "nonfinite-step-00000004"
    state, tensors = checkpoint.load(saved)
    assert state["step"] == 3
    assert all(torch.equal(tensors["weights"][n], t) for n, t in before.items())
    assert checkpoint.list_checkpoints(saved.parent) == [], "never picked up by --resume auto"
    again = Trainer(replace(config, resume=str(saved)))
    again.start_clock()
    again.step()
    assert again.step_count == 4
    again.close()


@pytest.mark.slow
def test_non_finite_exit_code(tmp_path):
    """From the command line, with a learning rate that blows the model up."""
    done = tiny.run(
        "--preset", "nano", "--data", tiny.write_text(tmp_path), "--out", tmp_path / "run",
        "--lr", "1e20", "--warmup", 0, "--steps", 30, "--threads", 1, "--context", 64,
        "--tokens-per-step", 256, "--clip", 0, "--no-qk-norm",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "the weights before this step are in" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "run" / "checkpoints").glob("nonfinite-*"))


def test_a_failed_save_is_survived_and_said(tmp_path, monkeypatch):
    config = tiny.config(tmp_path, steps=4, save_every=2)
    trainer = Trainer(config)
    save = checkpoint.save

    def full(root, step, *rest):
        if step == 4:
            raise OSError(28, "No space left on device")
        return save(root, step, *rest)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(NotSaved, match="No space left on device") as raised:
        trainer.run()
    trainer.close()
    assert raised.value.exit_code == 4
    assert len(tiny.losses(config.out)) == 4, "training went on"
    assert checkpoint.load_newest(trainer.checkpoints)[1]["step"] == 2


@pytest.mark.slow
def test_time_limit_and_signal(tmp_path):
    config = tiny.config(tmp_path, steps=50, time_limit=1e-9)
    with pytest.raises(Stopped, match="time limit after step 1") as raised:
        train(config)
    assert raised.value.exit_code == 5
    with pytest.raises(Stopped, match="time limit after step 2"):  # what came before counts
        train(replace(config, resume="auto", time_limit=9.0), began=time.perf_counter() - 10)
    trainer = Trainer(replace(config, resume="auto", time_limit=0.0))
    step = trainer.step

    def step_then_terminate(stop):
        if trainer.step_count == 5:
            signal.raise_signal(signal.SIGTERM)
        return step(stop)

    trainer.step = step_then_terminate
    with pytest.raises(Stopped, match="SIGTERM after step 6"):
        trainer.run()
    trainer.close()
    train(replace(config, resume="auto", time_limit=0.0))
    straight = replace(config, out=str(tmp_path / "straight"), time_limit=0.0)
    train(straight)
    assert tiny.losses(config.out) == tiny.losses(straight.out)


@pytest.mark.slow
def test_accumulation_and_recomputation_change_nothing_but_rounding(tmp_path):
    curves = {}
    for name, changes in {
        "whole": dict(micro_batch=4),
        "parts": dict(micro_batch=1),
        "recompute": dict(micro_batch=4, recompute=True),
        "compiled": dict(micro_batch=4, compile="aot_eager"),
        "dither": dict(micro_batch=4, recipe="vectorwise rounding=dither"),
        "dither-compiled": dict(
            micro_batch=4, recipe="vectorwise rounding=dither", compile="aot_eager"
        ),
    }.items():
        config = tiny.config(tmp_path, steps=4, layers=1, out=str(tmp_path / name), **changes)
        train(config)
        curves[name] = [loss for _, loss, _ in tiny.losses(config.out)]
    assert curves["recompute"] == curves["whole"], "recomputation is bit-equal"
    assert curves["dither-compiled"] == pytest.approx(curves["dither"], rel=1e-4)
    assert curves["dither"] != curves["whole"]
    for name in ("parts", "compiled"):
        assert curves[name] == pytest.approx(curves["whole"], rel=1e-4)


@pytest.mark.slow
def test_blocks_are_compiled_once(tmp_path):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    train(tiny.config(tmp_path, steps=3, layers=3, compile="aot_eager"))
    # A block and the head, each with and without gradients.
    assert counters["stats"]["unique_graphs"] <= 4
    assert not counters["graph_break"]


def test_bf16_grouped_queries_untied(tmp_path):
    config = tiny.config(
        tmp_path, steps=25, dtype="bf16", kv_heads=1, tied=False, qk_norm=False,
        recipe="vectorwise smooth_k=off lift=dQ,dK",
    )  # fmt: skip
    train(config)
    curve = [loss for _, loss, _ in tiny.losses(config.out)]
    assert curve[-1] < 0.9 * curve[0]


def test_evaluation_sample_and_summary(tmp_path):
    config = tiny.config(tmp_path, steps=10, eval_every=5, sample_tokens=12, prompt="the river")
    summary = train(config)
    entries = [json.loads(line) for line in (Path(config.out) / "log.jsonl").open()]
    evals = [e for e in entries if e["kind"] == "eval"]
    assert [e["step"] for e in evals] == [5, 10]
    assert evals[1]["loss"] < evals[0]["loss"]
    assert summary["eval_loss"] == evals[1]["loss"]
    sample = next(e for e in entries if e["kind"] == "sample")
    assert sample["text"].startswith("the river") and len(sample["text"]) >= 15
    assert json.loads((Path(config.out) / "summary.json").read_text()) == summary
