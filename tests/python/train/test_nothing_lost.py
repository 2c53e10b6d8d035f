# SPDX-License-Identifier: Apache-2.0
"""What can happen to the directory of a run: damaged and unreadable files, a second process, a full
disk, a larger number of steps. No checkpoint is lost, and no fault passes unnoticed."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
from sagebwd.train import Trainer, checkpoint, train
from sagebwd.train.__main__ import main
from sagebwd.train.errors import BadInput, InUse, NotSaved
from sagebwd.train.run_directory import RunDirectory
from sagebwd.train.schedule import learning_rate


def strict(text):
    """JSON as the standard has it: no bare NaN or Infinity."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 6 steps with checkpoints of 2, 4 and 6."""
    config = tiny.config(tmp_path_factory.mktemp("finished"), steps=6, save_every=2, keep=9)
    train(config)
    return config


@pytest.fixture
def copy(finished, tmp_path):
    """The same in a directory of its own, to be resumed."""
    shutil.copytree(finished.out, tmp_path / "run")
    return replace(finished, out=str(tmp_path / "run"), resume="auto")


def steps_in(config):
    return [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(_checkpoints(config))]


def _checkpoints(config):
    return Path(config.out) / "checkpoints"


# --- checkpoints that cannot be read --------------------------------------------------------------


def _other_format(path, monkeypatch):
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 9}))


def _io_error(path, monkeypatch):
    def read(file):
        if file.parent == path:
            raise OSError(errno.EIO, "Input/output error")
        return file.read_bytes()

    monkeypatch.setattr(checkpoint, "read_bytes", read)


def _cut_off(path, monkeypatch):
    raw = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(raw[:1000])


@pytest.mark.parametrize("harm", [_other_format, _io_error, _cut_off])
def test_a_checkpoint_that_cannot_be_read_is_kept(copy, monkeypatch, capsys, harm):
    want = tiny.losses(copy.out)
    newest = _checkpoints(copy) / "step-00000006"
    harm(newest, monkeypatch)
    before = {f.name: (f.stat().st_size, f.stat().st_ino) for f in newest.iterdir()}
    train(copy)
    assert tiny.losses(copy.out) == want and steps_in(copy) == [2, 4, 6]
    aside = _checkpoints(copy) / "aside-step-00000006"
    assert {f.name: (f.stat().st_size, f.stat().st_ino) for f in aside.iterdir()} == before
    assert f"kept as {aside}" in capsys.readouterr().out
    kinds = [json.loads(line)["kind"] for line in (Path(copy.out) / "log.jsonl").open()]
    assert "aside" in kinds


def test_keeping_few_does_not_cost_the_new_one(copy, monkeypatch):
    """If the unreadable checkpoint counted, --keep 1 would remove the one that was just saved."""
    _cut_off(_checkpoints(copy) / "step-00000006", monkeypatch)
    trainer = Trainer(replace(copy, keep=1))
    trainer.start_clock()
    trainer.step()
    trainer.save()
    trainer.close()
    assert steps_in(copy) == [5]
    assert checkpoint.load_newest(_checkpoints(copy), pytest.fail)[1]["step"] == 5


def test_none_that_can_be_read_stops_the_run(copy, monkeypatch):
    for path in checkpoint.list_checkpoints(_checkpoints(copy)):
        _other_format(path, monkeypatch)
    with pytest.raises(BadInput, match="none of the 3 checkpoints .* are kept"):
        Trainer(copy)
    assert steps_in(copy) == [2, 4, 6]
    log = (Path(copy.out) / "log.jsonl").read_text()
    assert log.count('"kind": "step"') == 6, "the log is as it was"


# --- one process at a time ------------------------------------------------------------------------


def test_a_second_run_is_refused(tmp_path, capsys):
    config = tiny.config(tmp_path, steps=3)
    first = Trainer(config)
    flags = ["--preset", "nano", "--data", config.data, "--out", config.out, "--resume", "auto"]
    assert main([*flags, "--context", "64", "--tokens-per-step", "256"]) == 6
    said = capsys.readouterr().err
    assert f"process {os.getpid()} on" in said and "--out" in said
    first.run()
    first.close()
    Trainer(replace(config, resume="auto")).close()


def test_the_lock_dies_with_its_process(tmp_path):
    config = tiny.config(tmp_path, steps=2)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mine = RunDirectory(config.out)
            mine.claim()
            os.write(write_end, b"locked")
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(read_end, 6) == b"locked"
    with pytest.raises(InUse, match=f"process {child} "):
        Trainer(config)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    train(config)


def test_a_failed_start_gives_the_directory_back(tmp_path):
    config = tiny.config(tmp_path, steps=2)
    with pytest.raises(BadInput) as kept:  # which keeps the frames of the failed one alive
        Trainer(replace(config, resume=str(tmp_path / "nothing")))
    Trainer(config).close()
    assert "neither a checkpoint" in str(kept.value)


# --- full disks -----------------------------------------------------------------------------------


class FullDisk:
    """From write ``at`` on, every write of the process fails, and so does what else takes room on
    a disk. Of a tensor file the first two writes count."""

    def __init__(self, patch, at):
        self.writes, self.at = 0, at
        real = open

        def opened(*arguments, **options):
            file = real(*arguments, **options)
            return _Writer(file, self) if file.writable() else file

        patch.setattr("builtins.open", opened)
        for name in ("mkdir", "fsync"):
            patch.setattr(os, name, self._wrapped(getattr(os, name)))

    def tick(self):
        self.writes += 1
        if self.writes >= self.at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _wrapped(self, function):
        def call(*arguments, **options):
            self.tick()
            return function(*arguments, **options)

        return call


class _Writer:
    def __init__(self, file, disk):
        self._file, self._disk, self._writes = file, disk, 0

    def write(self, data):
        self._writes += 1
        if self._writes <= 2 or self._disk.writes >= self._disk.at:
            self._disk.tick()
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def test_a_full_disk_at_every_write(copy, tmp_path):
    """Log, configuration, checkpoint, summary: each write in turn is the first to fail."""
    shutil.rmtree(_checkpoints(copy) / "step-00000006")
    for at in range(1, 100):
        here = replace(copy, out=str(tmp_path / f"at{at}"))
        shutil.copytree(copy.out, here.out)
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(patch, at)
            try:
                train(here, stream=sys.stderr)
            except NotSaved as error:
                assert "No space left on device" in str(error), f"write {at}"
            else:
                break
        newest = checkpoint.load_newest(_checkpoints(here), pytest.fail)[1]["step"]
        assert newest in (4, 6), f"write {at}"
        assert 2 in steps_in(here) and 4 in steps_in(here), "the older ones are untouched"
    assert disk.writes < at and 15 < at < 99, "every write was hit"
    assert tiny.losses(here.out) == tiny.losses(copy.out)


def test_a_full_disk_when_it_should_stop(tmp_path, monkeypatch):
    """Exit code 5 would promise that the state is saved."""
    config = tiny.config(tmp_path, steps=50, time_limit=1e-9)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(NotSaved, match="No space left"):
        train(config)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="cannot mount a disk")
def test_a_real_full_disk(tmp_path):
    """The command line, on a disk that two checkpoints fill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    data = tiny.write_text(tmp_path)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a disk")
    try:
        done = tiny.run(
            "--preset", "nano", "--data", data, "--out", disk / "run", "--context", 64,
            "--tokens-per-step", 256, "--save-every", 2, "--keep", 9, "--steps", 8, "--threads", 1,
            "--eval-tokens", "1K",
        )  # fmt: skip
        assert done.returncode == 4, done.stderr
        assert "could not be written" in done.stderr
        assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
        assert checkpoint.load_newest(disk / "run" / "checkpoints", pytest.fail)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_console_that_is_gone_does_not_stop_the_run(tmp_path):
    config = tiny.config(tmp_path, steps=3)

    class Gone:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self):
            pass

    assert train(config, stream=Gone())["steps"] == 3


def test_directories_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    config = tiny.config(tmp_path)
    with pytest.raises(BadInput, match="out: .* cannot be written to .Not a directory"):
        Trainer(replace(config, out=str(tmp_path / "file" / "run")))
    real = os.mkdir

    def read_only(path, *rest):
        if str(path).endswith("elsewhere"):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, *rest)

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(BadInput, match="Read-only file system"):
        Trainer(replace(config, out=str(tmp_path / "elsewhere")))


# --- files that were cut off ----------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", '{"steps": 6, "lo', "[1]", "[" * 100_000, '{"steps": 4}'])
def test_a_truncated_summary_is_made_again(copy, text):
    path = Path(copy.out) / "summary.json"
    want = json.loads(path.read_text())
    path.write_text(text)
    train(copy)
    got = json.loads(path.read_text())
    for name in ("steps", "tokens", "loss", "eval_loss", "activation_bytes", "data"):
        assert got[name] == want[name], name
    assert got["tokens_per_second"] > 0


def test_damaged_log_lines_are_dropped(copy):
    shutil.rmtree(_checkpoints(copy) / "step-00000006")
    want = tiny.losses(copy.out)
    path = Path(copy.out) / "log.jsonl"
    lines = path.read_bytes().splitlines()
    harm = [b'{"kind": "st', b"12", b"null", b'["a"]', b"\0" * 50, b"\xff\xfe", b'{"step": "x"}',
            b"[" * 100_000, b""]  # fmt: skip
    path.write_bytes(b"\n".join([*lines[:2], *harm, *lines[2:], b'{"kind": "step", "st']))
    train(copy)
    assert tiny.losses(copy.out) == want


# --- when checkpoints are written -----------------------------------------------------------------


def test_checkpoints_come_by_the_clock(tmp_path, monkeypatch):
    config = tiny.config(tmp_path, steps=6, keep=9)
    assert config.save_minutes == 10 and config.save_every == 0
    train(config)
    assert steps_in(config) == [6]
    every = replace(config, out=str(tmp_path / "every"), save_minutes=1e-9)
    train(every)
    assert steps_in(every) == [1, 2, 3, 4, 5, 6]
    never = replace(every, out=str(tmp_path / "never"), save_minutes=0.0)
    train(never)
    assert steps_in(never) == [6]
    # A clock that runs: each step takes four minutes.
    now = [0.0]

    def clock():
        now[0] += 1e-3
        return now[0]

    monkeypatch.setattr(time, "perf_counter", clock)
    trainer = Trainer(replace(config, out=str(tmp_path / "clock"), steps=9))
    trainer.start_clock()
    while not trainer.done:
        now[0] += 240
        trainer.step()
        trainer.after_step()
    trainer.close()
    assert steps_in(trainer.config) == [3, 6]


# --- more steps -----------------------------------------------------------------------------------


def test_a_run_can_be_extended(copy, capsys):
    first = tiny.losses(copy.out)
    longer = replace(copy, steps=10)
    summary = train(longer)
    said = capsys.readouterr().out
    assert "10 steps instead of 6" in said and "at step 10" in said
    rate = learning_rate(longer, 6)
    assert f"step 7 takes {rate:.2e}" in said
    assert f"{learning_rate(copy, 6):.2e}" in said
    assert summary["steps"] == 10 and steps_in(longer)[-1] == 10
    assert tiny.losses(copy.out)[:6] == first and len(tiny.losses(copy.out)) == 10
    entries = [json.loads(line) for line in (Path(copy.out) / "log.jsonl").open()]
    changed = next(e for e in entries if e["kind"] == "schedule")
    assert (changed["step"], changed["steps"], changed["steps_before"]) == (6, 10, 6)
    assert next(e for e in entries if e["kind"] == "step" and e["step"] == 7)["lr"] == rate
    with pytest.raises(BadInput, match="beyond --steps 8; give at least 10"):
        Trainer(replace(copy, steps=8))


# --- JSON -----------------------------------------------------------------------------------------


def _nan_when_evaluating(model):
    real = model.slice_loss

    def loss(*arguments):
        value, *grads = real(*arguments)
        return (value if model.training else value * torch.nan), *grads

    return loss


def test_every_file_is_json_when_losses_are_not_numbers(tmp_path, monkeypatch):
    """NaN in evaluations, audits and summaries: strict JSON, and the report reads it back."""
    from sagebwd.train import audit
    from sagebwd.train.compare import report_runs

    monkeypatch.setattr(audit, "_metrics", lambda value, exact: (torch.nan, torch.inf, -torch.inf))
    outs = []
    for name in ("fpa", "paper"):
        config = tiny.config(
            tmp_path, steps=3, audit_every=1, out=str(tmp_path / name),
            attention="fpa" if name == "fpa" else "sagebwd",
        )  # fmt: skip
        trainer = Trainer(config)
        trainer.model.slice_loss = _nan_when_evaluating(trainer.model)
        summary = trainer.run()
        trainer.close()
        assert summary["eval_loss"] != summary["eval_loss"]
        outs.append(Path(config.out))
    page = report_runs(outs)
    files = [page.with_suffix(".json")]
    for out in outs:
        files += [out / "summary.json", out / "config.json", *out.rglob("state.json")]
        for line in (out / "log.jsonl").read_text().splitlines():
            strict(line)
    for file in files:
        strict(file.read_text())
    assert strict((outs[0] / "summary.json").read_text())["eval_loss"] == "NaN"
