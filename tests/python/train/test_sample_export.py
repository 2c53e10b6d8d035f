# SPDX-License-Identifier: Apache-2.0
"""A trained model outside of the trainer: text from it, and the same model in transformers."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from sagebwd.train import checkpoint, tensor_file, train
from sagebwd.train.data.text import byte_symbols
from sagebwd.train.errors import BadInput, NotSaved
from sagebwd.train.export import export
from sagebwd.train.export import main as export_main
from sagebwd.train.load import load_weights
from sagebwd.train.sample import main as sample_main
from sagebwd.train.sample import sample_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A byte run with QK-norm and INT8 attention."""
    config = tiny.config(tmp_path_factory.mktemp("run"), steps=40)
    train(config)
    Path(config.data).unlink()  # neither tool needs the data
    return config.out


# --- sample ---------------------------------------------------------------------------------------


def test_sample(run):
    text = sample_run(run, "the river ", tokens=100)
    assert text.startswith("the river ") and len(text) == 110
    assert text == sample_run(run, "the river ", tokens=100)
    assert text != sample_run(run, "the river ", tokens=100, seed=1)
    assert sum(c in " .\naeiou" for c in text) > 30, "it has learned something"
    assert sample_run(run, "", tokens=5).startswith("\n")


def test_greedy_is_the_limit_of_the_others(run):
    greedy = sample_run(run, "the", tokens=30, temperature=0)
    assert greedy == sample_run(run, "the", tokens=30, top_k=1, seed=5)
    assert greedy == sample_run(run, "the", tokens=30, temperature=1e-30, seed=6)
    assert greedy != sample_run(run, "the", tokens=30, temperature=1.0, seed=6)


def test_top_k_takes_no_other():
    from sagebwd.train.generate import _choose

    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 50, generator=g)
    best = set(logits.topk(4).indices[0].tolist())
    seen = {_choose(logits, 2.0, 4, g).item() for _ in range(300)}
    assert seen == best


def test_attention_can_be_chosen(run):
    texts = {a: sample_run(run, "a", tokens=60, attention=a, temperature=1.5)
             for a in ("", "vectorwise", "fpa", "exact", "paper")}  # fmt: skip
    assert texts[""] == texts["vectorwise"], "what the run had"
    assert texts["fpa"] == texts["exact"]
    assert all(len(t) > 10 for t in texts.values())


@pytest.mark.slow
def test_importing_the_trainer_leaves_the_tools_alone():
    """Otherwise ``python -m`` would warn that it runs a module for the second time."""
    code = (
        "import sys, sagebwd.train; "
        "sys.exit(any(f'sagebwd.train.{n}' in sys.modules for n in ('sample', 'export')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_sample_on_the_command_line(run, capsys):
    assert sample_main([run, "--prompt", "the ", "--tokens", "7", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the ")
    assert sample_main(["nowhere"]) == 2
    assert "nowhere: neither a checkpoint nor a run" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert sample_main([run, "--device", "cuda"]) == 2
        assert "PyTorch sees no CUDA device" in capsys.readouterr().err
    for bad in (["--temperature", "nan"], ["--temperature", "-1"], ["--tokens", "0"],
                ["--top-k", "-3"], ["--seed", "-1"], ["--seed", str(2**64)],
                ["--attention", "int4"]):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            sample_main([run, *bad])
        assert ended.value.code == 2


def test_sample_of_a_damaged_run(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    newest = checkpoint.find(tmp_path / "run")
    raw = bytearray((newest / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (newest / "weights.safetensors").write_bytes(raw)
    with pytest.raises(BadInput, match="damaged"):
        sample_run(tmp_path / "run", "a")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Runs on GPT-2 ids: with and without the tokenizer they belong to."""
    here = tmp_path_factory.mktemp("shards")
    words = [*(byte_symbols()[b] for b in range(256)), "th", "the", "<|endoftext|>"]
    (here / "encoder.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (here / "vocab.bpe").write_text("#version: 0.2\nt h\nth e\n")
    ids = np.random.default_rng(0).integers(0, 258, 3000)
    (here / "a.bin").write_bytes(ids.astype("<u2").tobytes())
    for name, tokenizer in (("known", str(here)), ("unknown", "bytes")):
        train(tiny.config(here, steps=1, data=str(here / "a.bin"), tokenizer=tokenizer, vocab=300,
                          out=str(here / name)))  # fmt: skip
    return here


def test_ids_that_nobody_explained(shards, tmp_path):
    """Better no text than that of another tokenizer."""
    with pytest.raises(BadInput, match="give --tokenizer DIR"):
        sample_run(shards / "unknown", "the")
    with pytest.raises(BadInput, match="give --tokenizer DIR"):  # before the first step
        train(tiny.config(tmp_path, data=str(shards / "a.bin"), sample_tokens=5))
    pytest.importorskip("tokenizers")
    assert sample_run(shards / "unknown", "the", tokens=3, tokenizer=str(shards)).startswith("the")
    assert sample_run(shards / "known", "the", tokens=3).startswith("the")


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("Llama", dict(qk_norm=False)),
        ("Llama", dict(qk_norm=False, heads=4, kv_heads=2, tied=False, rope_base=500.0)),
        ("Qwen3", dict(kv_heads=1)),
        ("Qwen3", dict(tied=False, width=96, heads=4, vocab=270)),
    ],
)
def test_same_logits_in_transformers(tmp_path, kind, changes):
    transformers = pytest.importorskip("transformers")
    config = tiny.config(tmp_path, steps=8, lr=0.03, attention="fpa", **changes)
    train(config)
    out = export(config.out)
    assert out == Path(config.out) / "export"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    ours = load_weights(config.out).model.eval()
    gains = [p for n, p in ours.named_parameters() if n.endswith("gain")]
    assert all((p != 1).any() for p in gains), "gains of 1 would hide one that is forgotten"
    tokens = torch.randint(0, 256, (3, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = ours(tokens), theirs(tokens).logits
    assert b.dtype == torch.float32 and a.shape == b.shape
    assert (a - b).abs().max() < 1e-4 * a.abs().max()
    assert a.abs().max() > 1


def test_byte_tokenizer_in_transformers(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    out = export(run, tmp_path / "out", dtype="bf16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "naïve  café\t\n 漢字 don't  x" + "".join(map(chr, range(1, 256)))
    ids = tokenizer(text)["input_ids"]
    assert bytes(ids) == text.encode() and tokenizer.decode(ids) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id is None, "byte 2 ends nothing"
    given = tokenizer("the river", return_tensors="pt")
    made = model.generate(**given, max_new_tokens=30, min_new_tokens=30)
    assert made.shape == (1, 39)


def test_gpt2_tokenizer_in_transformers(shards, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(export(shards / "known", tmp_path / "a"))
    assert tokenizer("the other")["input_ids"] == [257, 32, 111, 257, 114]
    files = {f.name for f in export(shards / "unknown", tmp_path / "b").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}


def test_export_on_the_command_line(run, tmp_path, capsys):
    out = tmp_path / "there"
    newest = str(checkpoint.find(run))
    assert export_main([newest, "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    (out / "mine").write_text("x")
    assert export_main([run, "--out", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err and (out / "mine").exists()
    assert export_main([run, "--out", str(out), "--overwrite"]) == 2, "it is the user's"
    assert "holds mine" in capsys.readouterr().err and (out / "mine").exists()
    (out / "mine").unlink()
    before = (out / "model.safetensors").stat().st_ino
    assert export_main([run, "--out", str(out), "--overwrite", "--dtype", "bf16"]) == 0
    assert (out / "model.safetensors").stat().st_ino != before
    assert [p.name for p in tmp_path.iterdir()] == ["there"], "the older one is gone"
    assert export_main([str(tmp_path)]) == 2
    assert "neither a checkpoint nor a run" in capsys.readouterr().err


def files_below(directory):
    return {p: p.read_bytes() for p in Path(directory).rglob("*") if p.is_file()}


def test_export_replaces_exports_alone(run, tmp_path, capsys, monkeypatch):
    """Whatever is given as --out: a run, what is in it or above it, another's files."""
    copy = tmp_path / "runs" / "a"
    shutil.copytree(run, copy)
    model = tmp_path / "model"  # as another program has saved it, under the very same names
    export(copy, model)
    tensors = tensor_file.read_tensors(model / "model.safetensors")
    tensor_file.write_tensors(model / "model.safetensors", tensors, {"format": "pt"})
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(copy)
    newest = checkpoint.find(copy)
    before = files_below(tmp_path)
    monkeypatch.chdir(tmp_path / "runs")
    for out in (copy, copy.parent, copy / "checkpoints", newest, copy / "checkpoints/step-00000099",
                ".", "..", "/", model, tmp_path / "file", tmp_path / "link"):  # fmt: skip
        assert export_main([str(copy), "--out", str(out), "--overwrite"]) == 2, out
        said = capsys.readouterr().err
        assert said.startswith("sagebwd.train.export: out: ") and "--out" in said
    assert files_below(tmp_path) == before
    assert export(copy, tmp_path / "link" / "made") == tmp_path / "link" / "made"
    assert (copy / "made" / "config.json").exists(), "a link on the way is no danger"


def test_an_export_that_fails_leaves_the_older_one(run, tmp_path, monkeypatch):
    out = export(run, tmp_path / "out")
    before, rename = files_below(out), os.rename

    def fails(a, b):
        if Path(b) == out and ".old." not in str(a):
            raise OSError(errno.EIO, "Input/output error")
        rename(a, b)

    monkeypatch.setattr("os.rename", fails)
    with pytest.raises(NotSaved, match="Input/output"):
        export(run, out, "bf16", overwrite=True)
    assert files_below(out) == before and list(tmp_path.iterdir()) == [out]


def test_weights_beyond_the_range_of_fp16(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = checkpoint.find(tmp_path / "run")
    state, tensors = checkpoint.load(path)
    tensors["weights"]["norm.gain"][3] = 1e6
    for name in ("format", "step", "sha256"):
        state.pop(name)
    checkpoint.save(path.parent, 40, tensors, state, keep=1)
    with pytest.raises(BadInput, match="norm.weight has values up to 1e.06, fp16 .* --dtype bf16"):
        export(tmp_path / "run", dtype="fp16")
    assert not (tmp_path / "run" / "export").exists()
    for dtype in ("bf16", "fp32"):
        weights = export(tmp_path / "run", dtype=dtype, overwrite=True) / "model.safetensors"
        assert all(t.isfinite().all() for t in tensor_file.read_tensors(weights).values())


def test_export_to_a_full_disk(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sagebwd.train.export.write_new", full)
    with pytest.raises(NotSaved, match="No space left"):
        export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
