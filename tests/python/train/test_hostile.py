# SPDX-License-Identifier: Apache-2.0
"""Directories and files that somebody else has prepared: links, pipes, devices, numbers beyond
sense. A command says what is wrong. It does not hang, follow a link out of the run, or end in a
traceback."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from sagebwd.train import Trainer, checkpoint, tensor_file, train
from sagebwd.train.__main__ import main
from sagebwd.train.data import Batches, open_data
from sagebwd.train.errors import BadInput, InUse
from sagebwd.train.files import read_bytes, write_text
from sagebwd.train.load import load_weights
from sagebwd.train.model import build, parameter_count
from sagebwd.train.run_directory import RunDirectory


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    config = tiny.config(tmp_path_factory.mktemp("done"), steps=4)
    train(config)
    return config


# --- the directory of a run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["lock", ".config.json.tmp", ".summary.json.tmp", ".log.jsonl.tmp", "config.json",
             "summary.json", "log.jsonl"],
)  # fmt: skip
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_planted_links(tmp_path, name, link):
    """What they lead to is not written."""
    config = tiny.config(tmp_path, steps=2)
    target, run = tmp_path / "precious", Path(config.out)
    target.write_text("as it was")
    run.mkdir()
    link(target, run / name)
    if name == "lock":
        with pytest.raises(BadInput, match="lock is a .* remove it"):
            train(config)
    else:
        train(config)
        assert (run / "summary.json").is_file() and not (run / name).is_symlink()
    assert target.read_text() == "as it was"


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_planted_directories(tmp_path, name):
    config = tiny.config(tmp_path, steps=2, overwrite=True)
    other = tiny.config(tmp_path, steps=2, out=str(tmp_path / "other"))
    train(other)
    before = tiny.weights(other.out)
    Path(config.out).mkdir()
    (Path(config.out) / name).symlink_to(Path(other.out) / "checkpoints")
    with pytest.raises(BadInput, match=f"{name} is a symbolic link"):
        train(config)
    assert tiny.weights(other.out) == before


def test_the_run_itself_may_be_a_link(tmp_path):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large disk")
    train(tiny.config(tmp_path, steps=2))
    assert tiny.weights(tmp_path / "large disk")
    train(tiny.config(tmp_path, steps=3, resume="auto"))
    assert len(tiny.losses(tmp_path / "large disk")) == 3


def test_removing_the_lock_lets_nobody_in(tmp_path):
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    first.claim()
    (tmp_path / "run" / "lock").unlink()
    with pytest.raises(InUse):
        second.claim()
    first.release()
    second.claim()
    with pytest.raises(InUse, match=f"process {os.getpid()} on"):
        first.claim()
    second.release()


def test_a_file_system_that_locks_files_alone(tmp_path, monkeypatch):
    """As over a network."""
    import fcntl

    flock = fcntl.flock

    def files_alone(handle, how):
        if isinstance(handle, int):
            raise OSError(9, "Bad file descriptor")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", files_alone)
    first, second, said = RunDirectory(tmp_path), RunDirectory(tmp_path), []
    first.claim(said.append)
    with pytest.raises(InUse):
        second.claim(said.append)
    assert not said
    first.release()


def test_files_that_never_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(OSError, match="a device, a pipe"):
            read_bytes(path)
        with pytest.raises(OSError, match="a device, a pipe"):
            tensor_file.read_tensors(path)
    with pytest.raises(OSError, match="more than 100 bytes"):
        read_bytes("/proc/self/status", 100)
    write_text(tmp_path / "a", "x" * 101)
    with pytest.raises(OSError, match="it has 101 bytes, 100 are the most"):
        read_bytes(tmp_path / "a", 100)
    assert read_bytes(tmp_path / "a", 101) == b"x" * 101


# --- data -----------------------------------------------------------------------------------------


def shard(path, magic, version, dtype, ids):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(ids)
    path.write_bytes(head.tobytes() + np.asarray(ids, dtype).tobytes())
    return path


def test_two_vocabularies(tmp_path):
    """Token 262 is " the" to GPT-2 and something else to Llama 3."""
    ids = np.arange(4000) % 300
    here = tmp_path / "mixed"
    here.mkdir()
    shard(here / "a.bin", 20240520, 1, "<u2", ids)
    shard(here / "b.bin", 20240801, 7, "<u4", ids)
    (tmp_path / "t.txt").write_text(tiny.text(2000))
    config = tiny.config(tmp_path, data=str(here))
    for changes in ({}, dict(vocab=128256), dict(data=f"{here}/a.bin", val=f"{here}/b.bin"),
                    dict(data=f"{here}/a.bin,{tmp_path}/t.txt")):  # fmt: skip
        with pytest.raises(BadInput, match="a.bin has tokens of one vocabulary .50257 ids"):
            open_data(replace(config, **changes))
    assert open_data(replace(config, data=f"{here}/b.bin")).vocab == 128256


def test_vocabularies_by_name(tmp_path):
    ids = np.random.default_rng(0).integers(0, 300, 4000).astype("<u2")
    for name in ("pile_gpt2_0.bin", "pile_GPT-2_1.bin", "pile_llama2_0.bin", "more.bin"):
        (tmp_path / name).write_bytes(ids.tobytes())
    (tmp_path / "made_up.txt").write_text("x")
    config = tiny.config(tmp_path)
    with pytest.raises(BadInput, match="one vocabulary .gpt2., .*llama2"):
        open_data(replace(config, data=str(tmp_path)))
    good = ",".join(str(tmp_path / n) for n in ("pile_gpt2_0.bin", "pile_GPT-2_1.bin", "more.bin"))
    assert sum(map(len, open_data(replace(config, data=good)).train)) > 11_000


def test_wide_ids_without_a_header(tmp_path):
    ids = np.random.default_rng(0).integers(0, 128_000, 4000)
    (tmp_path / "a.bin").write_bytes(ids.astype("<u4").tobytes())
    with pytest.raises(BadInput, match="looks like 32-bit token ids"):
        open_data(tiny.config(tmp_path, data=str(tmp_path / "a.bin")))


def test_llama_3_is_not_read_as_bytes_of_gpt2(tmp_path):
    from sagebwd.train.data.text import byte_symbols

    words = {byte_symbols()[b]: b for b in range(256)}
    (tmp_path / "encoder.json").write_text(json.dumps(words))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    path = shard(tmp_path / "a.bin", 20240801, 7, "<u4", np.arange(4000) % 200)
    config = tiny.config(tmp_path, data=str(path), tokenizer=str(tmp_path), as_bytes=True)
    with pytest.raises(BadInput, match="ids of Llama 3"):
        open_data(config)


def test_data_that_is_nothing(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "a.txt")
    out = str(tmp_path / "run")
    for data, words in {
        ",": "expected files or directories",
        " ": "expected files or directories",
        "/dev/zero": "a device, a pipe",
        str(tmp_path / "pipe"): "a device, a pipe",
        str(tmp_path / "pipe.bin"): "a device, a pipe",
        str(tmp_path / "folder"): "a device, a pipe",
        "x" * 5000: "cannot be read",
    }.items():
        assert main(["--preset", "nano", "--data", data, "--out", out]) == 2
        assert words in capsys.readouterr().err, data
    assert main(["--preset", "nano", "--data", tiny.write_text(tmp_path), "--val", ","]) == 2
    assert "val: expected" in capsys.readouterr().err
    for config in ("/dev/zero", tmp_path / "pipe", tmp_path):
        assert main(["--config", str(config)]) == 2
        assert f"config: {config} cannot be read (" in capsys.readouterr().err
    assert not Path(out).exists()


def test_text_of_any_size(tmp_path):
    with open(tmp_path / "large.txt", "wb") as file:
        file.truncate(8 << 40)
    with pytest.raises(BadInput, match="8796093022208 bytes, 4000000000 are.*--unpack-limit"):
        open_data(tiny.config(tmp_path, data=str(tmp_path / "large.txt")))


def test_more_epochs_than_anybody_reads():
    batches = Batches([np.arange(100, dtype="<u2")], 16, 0, torch.device("cpu"))
    assert batches.rows(50_000, 2).shape == (2, 17)
    with pytest.raises(BadInput, match="epochs"):
        batches.rows(2**40, 1)


# --- checkpoints ----------------------------------------------------------------------------------


def hostile(done, directory, **changes):
    """A copy of the run whose state.json is sound in itself, and says something else."""
    shutil.copytree(done.out, directory)
    path = checkpoint.find(directory)
    state = json.loads((path / "state.json").read_text())
    state.pop("checksum")
    state["config"].update(changes)
    state.update({k: v for k, v in changes.items() if k in state})
    size = state["config"]["tokens_per_step"] // state["config"]["context"]
    state["sequences_read"] = state["step"] * size
    state["checksum"] = checkpoint._checksum(state)
    (path / "state.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        dict(layers=10**9),
        dict(width=2**40, heads=2**40 // 64),
        dict(ffn=2**40),
        dict(vocab=2**40),
        dict(context=2**40, tokens_per_step=2**40),
        dict(layers=2**62, width=2**40, heads=2**34),
    ],
)
def test_models_beyond_sense(done, tmp_path, changes):
    hostile(done, tmp_path / "run", **changes)
    with pytest.raises(BadInput, match="the model that its configuration|this machine has"):
        load_weights(tmp_path / "run")


def test_numbers_beyond_floats(done, tmp_path):
    hostile(done, tmp_path / "run", seconds=10**400)
    with pytest.raises(BadInput, match="state.json is damaged"):
        load_weights(tmp_path / "run")


def test_a_model_larger_than_the_machine(tmp_path, capsys):
    flags = ["--preset", "nano", "--data", tiny.write_text(tmp_path), "--out", str(tmp_path / "r")]
    assert main([*flags, "--layers", "1000000000"]) == 2
    assert "1000000000 layers of width" in capsys.readouterr().err


def test_the_count_of_parameters(done):
    for changes in ({}, dict(tied=False, vocab=270), dict(qk_norm=False, heads=4, kv_heads=2)):
        config = replace(done, **changes)
        model = build(config, 270, torch.device("cpu"))
        assert parameter_count(config, 270) == sum(p.numel() for p in model.parameters())


def test_weights_of_8_tib(done, tmp_path):
    shutil.copytree(done.out, tmp_path / "run")
    with open(checkpoint.find(tmp_path / "run") / "weights.safetensors", "r+b") as file:
        file.truncate(8 << 40)
    with pytest.raises(BadInput, match="8796.1 GB do not fit into the memory"):
        load_weights(tmp_path / "run")
    with pytest.raises(BadInput, match="none of the 1 checkpoints"):
        Trainer(replace(done, out=str(tmp_path / "run"), resume="auto"))


def test_a_state_of_8_tib(done, tmp_path):
    shutil.copytree(done.out, tmp_path / "run")
    os.truncate(checkpoint.find(tmp_path / "run") / "state.json", 8 << 40)
    with pytest.raises(BadInput, match="8796093022208 bytes"):
        load_weights(tmp_path / "run")


# --- reports --------------------------------------------------------------------------------------


def test_the_report_goes_to_out(done, tmp_path, capsys):
    assert main(["--report", done.out, "--out", str(tmp_path / "new")]) == 0
    assert f"the report is {tmp_path / 'new' / 'report.html'}" in capsys.readouterr().out
    assert (tmp_path / "new" / "report.json").exists()
    assert not (Path(done.out).parent / "report.html").exists()
    assert main(["--report", done.out, "--steps", "3", "--compare", "fpa"]) == 2
    assert "--out alone, not --steps, --compare" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"attention": [], "eval_loss": "x"}'])
def test_reports_on_other_figures(done, tmp_path, capsys, name, text):
    shutil.copytree(done.out, tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    assert main(["--report", str(tmp_path / "run")]) == 2
    assert "figures are missing or damaged" in capsys.readouterr().err


def test_a_report_without_a_log(done, tmp_path, capsys):
    shutil.copytree(done.out, tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").unlink()
    assert main(["--report", str(tmp_path / "run")]) == 2
    assert "log.jsonl: cannot be read" in capsys.readouterr().err


# --- how threads wait -----------------------------------------------------------------------------


def waiting(*arguments, **variables):
    """Rounds that OpenMP's threads spin before they sleep, as it says itself."""
    kept = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    ended = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True,
        env={**kept, "OMP_DISPLAY_ENV": "VERBOSE", **variables},
    )  # fmt: skip
    lines = [line for line in ended.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not lines:
        pytest.skip("this OpenMP does not say what it has read")
    return min(int(line.split("=")[1].strip(" '")) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "sagebwd.train",
        "sagebwd.sla2.demo",
        pytest.param("sagebwd.train.export", marks=pytest.mark.long),
        pytest.param("sagebwd.train.demo", marks=pytest.mark.long),
        pytest.param("sagebwd.evidence", marks=pytest.mark.long),
    ],
)
def test_programs_wait_without_spinning(program):
    assert waiting("-m", program, "--help") == 0


@pytest.mark.slow
def test_what_the_user_sets_stays():
    assert waiting("-m", "sagebwd.train", "--help", OMP_WAIT_POLICY="active") > 0
    assert waiting("-c", "import sagebwd", "sagebwd.train") > 0, "another program"


def test_a_program_that_comes_too_late_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    train(tiny.config(tmp_path, steps=1, threads=2))
    assert "set OMP_WAIT_POLICY=passive before" in capsys.readouterr().out
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    train(tiny.config(tmp_path, steps=1, threads=2, overwrite=True))
    assert "OMP_WAIT_POLICY" not in capsys.readouterr().out
