# SPDX-License-Identifier: Apache-2.0
"""Checkpoints survive kill -9 while saving, a full or read-only disk, damaged bytes and crafted
files."""

import errno
import json
import os
import random
import resource
import signal
import time

import pytest
import torch

from sagebwd.train import checkpoint
from sagebwd.train.errors import BadInput
from sagebwd.train.tensor_file import read_tensors, write_tensors

KILLS = 100


def _tensors(step):
    """Every element says which step wrote it."""
    full = lambda: torch.full((200, 100), float(step))
    return {"weights": {"a": full(), "b": full()}, "optimizer": {"a:exp_avg": full()}}


def _state(step):
    """What a run adds to a checkpoint."""
    return {
        "seconds": 1.5,
        "data": "0123456789abcdef",
        "vocab": 256,
        "tokenizer": "bytes",
        "sequences_read": 4 * step,
        "config": {"context": 64, "tokens_per_step": 256, "lr": 1e-3, "out": "run", "tied": True},
    }


def _save(root, step, keep=2):
    return checkpoint.save(root, step, _tensors(step), _state(step), keep)


def _save_for_ever(root, step, said):
    while True:
        _save(root, step)
        os.write(said, step.to_bytes(4, "little"))  # "step is saved": after save returned
        step += 1


def _saved_steps(pipe):
    data = b""
    while piece := os.read(pipe, 1 << 16):
        data += piece
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


@pytest.mark.long
def test_kill_while_saving(tmp_path):
    """A hundred processes are killed while they save; what they had saved before is kept."""
    rng = random.Random(3)
    began = time.perf_counter()
    for first in range(5):
        _save(tmp_path, first)
    once = (time.perf_counter() - began) / 5
    step, interrupted = 5, 0
    for _ in range(KILLS):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _save_for_ever(tmp_path, step, write_end)
            finally:
                os._exit(1)
        os.close(write_end)
        time.sleep(rng.uniform(0, 6 * once))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        saved = _saved_steps(read_end)
        os.close(read_end)
        interrupted += any(p.name.endswith(".tmp") for p in tmp_path.iterdir())
        if saved:
            step = saved[-1] + 1
        else:
            once *= 1.1  # the machine has become slower
        complaints = []
        _, state, tensors = checkpoint.load_newest(tmp_path, complaints.append)
        assert not complaints, "what has its final name is complete"
        assert state["step"] >= step - 1, "never older than the last that was announced"
        for group in tensors.values():
            assert all((t == state["step"]).all() for t in group.values())
        step = state["step"] + 1
    assert step > KILLS // 2, "processes came far enough to save"
    assert interrupted > KILLS // 10, "kills hit processes that were writing"


def test_full_disk(tmp_path):
    """Writing stops in the middle of a file; the older checkpoint stays and nothing is left
    behind."""
    _save(tmp_path, 1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            _save(tmp_path, 2)
        except OSError as error:
            os._exit(10 if error.errno == errno.EFBIG else 11)
        os._exit(12)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.load_newest(tmp_path)[1]["step"] == 1


def test_read_only(tmp_path, monkeypatch):
    _save(tmp_path, 1)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(OSError, match="Read-only"):
        _save(tmp_path, 2)
    assert checkpoint.load_newest(tmp_path)[1]["step"] == 1


def test_keeps_the_last(tmp_path):
    for step in range(5):
        _save(tmp_path, step)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == [
        "step-00000003",
        "step-00000004",
    ]


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors"])
def test_any_damaged_bit_of_a_tensor_file_is_found(tmp_path, file):
    """The damaged checkpoint is refused by name, and the one before it is used."""
    rng = random.Random(file)
    for step in (1, 2):
        _save(tmp_path, step)
    path = tmp_path / "step-00000002" / file
    good = path.read_bytes()
    for at in [*range(12), len(good) - 1, *(rng.randrange(len(good)) for _ in range(20))]:
        bit = 1 << rng.randrange(8)
        path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        with pytest.raises(BadInput, match="damaged"):
            checkpoint.load(path.parent)
        said = []
        assert checkpoint.load_newest(tmp_path, said.append)[1]["step"] == 1
        assert "step-00000002" in said[0]


def test_every_damaged_bit_of_the_state_is_found(tmp_path):
    """Every damaged file is refused, or read the same in every field."""
    path = _save(tmp_path, 2) / "state.json"
    good, want = path.read_bytes(), checkpoint.read_state(path.parent)
    same = 0
    for at in range(len(good)):
        for bit in range(8):
            flipped = good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
            try:
                found = checkpoint.parse_state(flipped, path.parent)
            except BadInput:
                continue
            assert found == want and repr(found) == repr(want), f"bit {bit} of byte {at}"
            same += 1
    assert same < 20, "almost nothing means the same"


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(step=3), "says step 3, the directory is named step-00000002"),
        (dict(sequences_read=9), "sequences_read is 9 at step 2"),
        (dict(step=2.0), "step is 2.0"),
        (dict(seconds=-1), "seconds is -1"),
        (dict(vocab="256"), "vocab is '256'"),
        (dict(config=None), "damaged"),
        (dict(sha256={"../weights": "0"}), "other files than weights and optimizer"),
        (dict(format=3), "format 3, this version reads 1 and 2"),
    ],
)
def test_a_state_that_contradicts_itself(tmp_path, changes, words):
    """Wrong content with a right checksum, which a bug or a user may produce."""
    path = _save(tmp_path, 2)
    state = {**checkpoint.read_state(path), **changes}
    state["checksum"] = checkpoint._checksum(state)
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(BadInput, match=words):
        checkpoint.load(path)


def test_nested_json_is_refused(tmp_path):
    path = _save(tmp_path, 2)
    (path / "state.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match="damaged"):
        checkpoint.load(path)


def test_format_1_is_still_read(tmp_path):
    path = _save(tmp_path, 2)
    state = {**checkpoint.read_state(path), "format": 1}
    (path / "state.json").write_text(json.dumps(state))
    assert checkpoint.load(path)[0]["step"] == 2


def test_none_that_can_be_read_is_not_none(tmp_path):
    """Starting anew over a run whose checkpoints fail to be read would lose it."""
    assert checkpoint.load_newest(tmp_path / "nothing") is None
    path = _save(tmp_path, 1)
    (path / "state.json").write_text("{}")
    with pytest.raises(BadInput, match="none of the 1 checkpoints"):
        checkpoint.load_newest(tmp_path, lambda text: None)


# --- kills and full disks at every single call ----------------------------------------------------

CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "open")


class Counter:
    """Calls of the operating system from here on. ``at``: which of them does not happen."""

    def __init__(self, monkeypatch, at, act):
        self.calls, self.at, self.act = 0, at, act
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))
        monkeypatch.setattr("builtins.open", self._wrapped(open))

    def _wrapped(self, function):
        def call(*arguments, **options):
            self.calls += 1
            if self.calls >= self.at:
                self.act()
            return function(*arguments, **options)

        return call


def _in_child(work):
    """Runs ``work`` in a forked process; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_saving_a_step_again_is_never_without_it(tmp_path, keep):
    """A process dies before each call of the operating system in turn. What is found is step 2,
    old or new, sound in every byte."""
    for at in range(1, 200):
        root = tmp_path / str(at)
        for step in (1, 2):
            _save(root, step, keep)

        def save_until_killed():
            with pytest.MonkeyPatch.context() as patch:
                Counter(patch, at, lambda: os._exit(9))
                _save(root, 2, keep)

        status = _in_child(save_until_killed)
        assert status in (0, 9)
        complaints = []
        _, state, tensors = checkpoint.load_newest(root, complaints.append)
        assert not complaints and state["step"] == 2, f"killed before call {at}"
        assert (tensors["weights"]["a"] == 2).all()
        _save(root, 3, keep)  # and what was left behind is cleared away
        names = sorted(p.name.removesuffix(".replaced") for p in root.iterdir())
        assert names == ["step-00000002", "step-00000003"][-keep:], f"killed before call {at}"
        if status == 0:
            break
    assert 15 < at < 199, "every call was hit"


def test_a_full_disk_at_every_call(tmp_path):
    """From each call on, everything fails. The older checkpoints stay."""
    for at in range(1, 200):
        root = tmp_path / str(at)
        _save(root, 1)

        def full():
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            counter = Counter(patch, at, full)
            try:
                _save(root, 2, keep=1)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        found = checkpoint.load_newest(root, pytest.fail)[1]["step"]
        assert found in (1, 2), f"call {at}"
        if counter.calls < at:
            break
    assert found == 2 and 10 < at < 199


def test_tensor_files_are_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "codes": torch.arange(-4, 4, dtype=torch.int8),
        "rng": torch.get_rng_state(),
    }
    write_tensors(tmp_path / "ours", tensors)
    library.save_file(tensors, tmp_path / "theirs")
    for read in (library.load_file(tmp_path / "ours"), read_tensors(tmp_path / "theirs")):
        assert read.keys() == tensors.keys()
        for name, t in tensors.items():
            assert read[name].dtype == t.dtype and torch.equal(read[name], t), name


def _crafted(header, body=b"\0" * 8):
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\x80\x04K\x01.",  # a pickle
        _crafted({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        _crafted({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}),
        _crafted({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}),
        _crafted({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
        _crafted({"a": {"dtype": "object", "shape": [1], "data_offsets": [0, 8]}}),
        _crafted({"a": [1, 2]}),
        _crafted([1]),
        _crafted({"a": {"dtype": "F32", "shape": [2.9], "data_offsets": [0, 8]}}),
        _crafted({"a": {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 8]}}),
        _crafted({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}),
        _crafted({"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}),
        _crafted({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8.0]}}),
        _crafted({"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, b""),
        _crafted({"a": {"dtype": "F32", "shape": [0, 2**70], "data_offsets": [0, 0]}}, b""),
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_crafted_tensor_files_are_refused(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadInput, match="not a sound safetensors file"):
        read_tensors(tmp_path / "f")


def test_nothing_is_unpickled():
    """No part of the trainer can load code from a file."""
    from pathlib import Path

    import sagebwd.train

    for path in Path(sagebwd.train.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for word in ("pickle.load", "torch.load(", "np.load(", "eval(", "exec("):
            assert word not in text.replace("model.eval(", ""), f"{path.name}: {word}"
