# SPDX-License-Identifier: Apache-2.0
"""Data sources: every format, every way a file can be wrong, and the order of the sequences."""

import json
import lzma

import numpy as np
import pytest
import torch

import tiny
from sagebwd.train.data import Batches, evaluation_windows, open_data
from sagebwd.train.data.text import ByteTokenizer, Gpt2Tokenizer, byte_symbols
from sagebwd.train.errors import BadInput


def ids(n=2000, top=50257, seed=0):
    return np.random.default_rng(seed).integers(0, top, n)


def llm_c(path, tokens, magic=20240520, version=1, count=None, dtype="<u2"):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(head.tobytes() + np.asarray(tokens, dtype).tobytes())


def opened(path, **changes):
    return open_data(tiny.config(path.parent, **{"data": str(path), **changes}))


def stream(source):
    return np.concatenate([np.asarray(s, np.int64) for s in source.train + source.val])


# --- formats --------------------------------------------------------------------------------------


def test_llm_c(tmp_path):
    llm_c(tmp_path / "a.bin", ids())
    source = opened(tmp_path / "a.bin")
    assert source.vocab == 50257
    assert (stream(source) == ids()).all()


def test_llm_c_llama3(tmp_path):
    tokens = ids(top=128256)
    llm_c(tmp_path / "a.bin", tokens, 20240801, 7, dtype="<u4")
    source = opened(tmp_path / "a.bin")
    assert source.vocab == 128256
    assert (stream(source) == tokens).all()
    rows = Batches(source.train, 64, 0, torch.device("cpu")).rows(0, 3)
    assert rows.max() > 65536, "32-bit tokens survive"


def test_nanogpt_directory(tmp_path):
    (tmp_path / "train.bin").write_bytes(ids(seed=1).astype("<u2").tobytes())
    (tmp_path / "val.bin").write_bytes(ids(500, seed=2).astype("<u2").tobytes())
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04}.")  # there, and never opened
    source = opened(tmp_path / "train.bin", data=str(tmp_path))
    assert (np.concatenate(source.train) == ids(seed=1)).all()
    assert (np.concatenate(source.val) == ids(500, seed=2)).all()


def test_xz_shards(tmp_path):
    for i in range(2):
        with lzma.open(tmp_path / f"train_{i}.u16.xz", "wb") as file:
            file.write(ids(seed=i).astype("<u2").tobytes())
    source = opened(
        tmp_path / "x", data=f"{tmp_path}/train_0.u16.xz, {tmp_path}/train_1.u16.xz", val=""
    )
    assert (stream(source) == np.concatenate([ids(seed=0), ids(seed=1)])).all()


def test_plain_text_as_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("naïve café, " * 200)
    source = opened(tmp_path / "a.txt")
    assert source.vocab == 256
    assert ByteTokenizer().decode(stream(source)) == "naïve café, " * 200


def test_standard_library_when_nothing_is_given(tmp_path):
    source = open_data(tiny.config(tmp_path, data=""))
    assert "standard library" in source.words
    assert source.vocab == 256
    text = source.tokenizer.decode(source.train[0][:100_000].tolist())
    assert "import" in text and "def " in text


@pytest.fixture
def bpe(tmp_path):
    """A byte-level BPE with two merges, in GPT-2's two files."""
    symbols = [byte_symbols()[b] for b in range(256)]
    words = [*symbols, "th", "the", "<|endoftext|>"]
    (tmp_path / "encoder.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nt h\nth e\n")
    return tmp_path


def test_bpe_text_and_back(bpe):
    pytest.importorskip("tokenizers")
    text = "the other café\n" * 100
    (bpe / "a.txt").write_text(text)
    source = opened(bpe / "a.txt", tokenizer=str(bpe))
    tokens = stream(source)
    assert (tokens == 257).sum() == 200, "'the' is one token, in 'the' and in 'other'"
    assert source.tokenizer.decode(tokens) == text


def test_shards_as_bytes(bpe):
    tokens = np.tile([257, ord(" "), 256, 258], 300)  # the, space, th, end of text
    with lzma.open(bpe / "a.u16.xz", "wb") as file:
        file.write(tokens.astype("<u2").tobytes())
    source = opened(bpe / "a.u16.xz", tokenizer=str(bpe), as_bytes=True)
    assert source.vocab == 256
    assert bytes(stream(source).astype(np.uint8)) == b"the th\n" * 300
    assert Gpt2Tokenizer(bpe).byte_table()[1][-1] == 256 + 2 + 3 + 1


# --- errors, all before the first step ------------------------------------------------------------


def bad_shards(directory):
    good = ids()
    write = lambda name, data: (directory / name).write_bytes(data)
    write("empty.bin", b"")
    write("odd.bin", b"abc")
    write("empty.txt", b"")
    write("binary.txt", bytes(range(256)) * 4)
    write("noise.u16.xz", b"not xz at all")
    with lzma.open(directory / "cut.u16.xz", "wb") as file:
        file.write(good.astype("<u2").tobytes())
    write("cut.u16.xz", (directory / "cut.u16.xz").read_bytes()[:-20])
    llm_c(directory / "announced.bin", good, count=len(good) + 1)
    llm_c(directory / "negative.bin", good, count=-5)
    llm_c(directory / "version.bin", good, version=2)
    llm_c(directory / "none.bin", [])
    write("header.bin", np.array([20240520, 1, 4], "<i4").tobytes())
    llm_c(directory / "ids.bin", [*good, 60000])
    llm_c(directory / "short.bin", good[:50])


@pytest.mark.parametrize(
    "name, words",
    [
        ("empty.bin", "empty"),
        ("odd.bin", "neither an llm.c shard"),
        ("empty.txt", "empty"),
        ("binary.txt", "not text"),
        ("noise.u16.xz", "not a complete .xz"),
        ("cut.u16.xz", "not a complete .xz"),
        ("announced.bin", "announces 2001 tokens, the file holds 2000"),
        ("negative.bin", "announces -5"),
        ("version.bin", "expected llm.c version 1, got 2"),
        ("none.bin", "holds no tokens"),
        ("header.bin", "cut off"),
        ("ids.bin", "token 2000 has id 60000"),
        ("short.bin", "a sequence takes 65 tokens"),
        ("missing.bin", "does not exist"),
    ],
)
def test_bad_files(tmp_path, name, words):
    bad_shards(tmp_path)
    with pytest.raises(BadInput, match=words) as raised:
        opened(tmp_path / name)
    assert raised.value.exit_code == 2


def test_a_file_that_unpacks_to_far_more(tmp_path):
    """50 MB of zeros in some kilobytes, and a limit of 20 MB."""
    with lzma.open(tmp_path / "bomb.u16.xz", "wb", preset=0) as file:
        for _ in range(50):
            file.write(bytes(1_000_000))
    assert (tmp_path / "bomb.u16.xz").stat().st_size < 50_000
    with pytest.raises(BadInput, match="more than 0.02 GB; .* --unpack-limit"):
        opened(tmp_path / "bomb.u16.xz", unpack_limit=0.02)
    assert len(opened(tmp_path / "bomb.u16.xz", unpack_limit=0.05).train[0]) > 20_000_000


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "[1]", '{"a": -1}', '{"a": 2.9}', '{"€€": 0}']
)
def test_a_damaged_vocabulary(tmp_path, text):
    (tmp_path / "encoder.json").write_text(text)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    llm_c(tmp_path / "a.bin", ids())
    with pytest.raises(BadInput, match="encoder.json is damaged"):
        opened(tmp_path / "a.bin", tokenizer=str(tmp_path), as_bytes=True)


def test_ids_that_nobody_explained_have_no_tokenizer(tmp_path):
    """Bytes would be taken for the text of GPT-2's ids."""
    llm_c(tmp_path / "a.bin", ids())
    assert opened(tmp_path / "a.bin").tokenizer is None


def test_vocabulary_too_small(tmp_path):
    llm_c(tmp_path / "a.bin", ids())
    with pytest.raises(BadInput, match="vocabulary has 1000 ids"):
        opened(tmp_path / "a.bin", vocab=1000)


def test_other_refusals(tmp_path):
    (tmp_path / "nothing").mkdir()
    for changes, words in (
        (dict(data=str(tmp_path / "nothing")), "holds no .bin"),
        (dict(tokenizer=str(tmp_path)), "is not a directory with encoder.json"),
    ):
        with pytest.raises(BadInput, match=words):
            open_data(tiny.config(tmp_path, **changes))
    llm_c(tmp_path / "a.bin", ids())
    with pytest.raises(BadInput, match="needs --tokenizer"):
        opened(tmp_path / "a.bin", as_bytes=True)


@pytest.mark.slow
def test_error_on_the_command_line(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    done = tiny.run("--preset", "nano", "--data", tmp_path / "a.bin", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.strip() == f"sagebwd.train: {tmp_path}/a.bin: the file is empty"


# --- order ----------------------------------------------------------------------------------------


def batches(seed=0, context=8, lengths=(100, 61)):
    base = 0
    shards = []
    for n in lengths:
        shards.append(np.arange(base, base + n).astype("<u2"))
        base += 1000
    return Batches(shards, context, seed, torch.device("cpu"))


def test_an_epoch_reads_everything_once():
    b = batches()
    rows = b.rows(0, 12 + 7)
    assert (rows[:, 1:] - rows[:, :-1] == 1).all(), "no sequence crosses a shard"
    assert len(set(rows[:, 0].tolist())) == 19
    assert sorted(rows[:, 0].tolist()) != rows[:, 0].tolist(), "in a random order"


def test_order_does_not_depend_on_how_it_is_asked():
    b, c = batches(), batches()
    whole = b.rows(0, 60)
    parts = torch.cat([c.rows(i, 4) for i in range(0, 60, 4)])
    assert torch.equal(whole, parts)
    assert torch.equal(c.rows(23, 5), whole[23:28]), "and back again"
    assert not torch.equal(batches(seed=1).rows(0, 19), whole[:19])


def test_data_that_does_not_move_to_the_device(monkeypatch):
    want = batches().rows(0, 60)
    monkeypatch.setattr("sagebwd.train.data.order._ON_DEVICE", 0)
    small = batches()
    assert small.tokens is None
    assert torch.equal(small.rows(0, 60), want)


def test_evaluation_windows():
    b = batches()
    windows = evaluation_windows(b, 64, 4)
    assert len(windows) == 8 and len(set(windows)) == 8
    assert len(evaluation_windows(b, 10**6, 4)) == 16, "no more than there are"
