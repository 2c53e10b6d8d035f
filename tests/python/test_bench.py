# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs, interleaves, and writes what it measured."""

import json
import os
import sys

import pytest
import torch

from sagebwd import bench, peers


def test_case_text():
    case = bench.Case.parse("b2 h8 hk2 n300 d64 causal bf16 paper")
    assert str(case) == "b2 h8 hk2 n300 d64 causal bf16 paper"
    assert bench.Case.parse("n8 h3").hk == 3
    assert case.flops("both") == 7 * 2 * 2 * 8 * (300 * 301 // 2) * 64
    with pytest.raises(ValueError, match="'window'"):
        bench.Case.parse("n8 window")


def test_peers_compute_attention():
    found, missing = peers.find("cpu")
    assert {p.name for p in found} | set(missing) == {"torch f32", "torch bf16"}
    q, k, v = torch.randn(1, 4, 20, 32), torch.randn(1, 2, 20, 32), torch.randn(1, 2, 20, 32)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    for peer in found:
        out = peer.call(*(t.to(peer.dtype) for t in (q, k, v)), True)
        torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02)


def test_default_cases():
    cases = [bench.Case.parse(text) for text in bench.DEFAULT_CASES["cpu"]]
    assert {(c.b, c.h, c.n, c.d, c.causal, c.recipe) for c in cases} == {
        (1, 8, 4096, d, causal, "vectorwise") for d in (64, 128) for causal in (True, False)
    }


def test_a_peer_that_crashes_is_left_out(tmp_path, monkeypatch):
    """One package that ends the process and one that prints and raises, after it."""
    (tmp_path / "flash_attn.py").write_text("import os; os.kill(os.getpid(), 11)")
    (tmp_path / "flash_attn_interface.py").write_text(
        "print('some\\tnews')\nraise ValueError('two\\nlines')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    names = ["flash-attn 2 bf16", "flash-attn 3 bf16"]
    assert peers._try("cuda", names) == dict(
        zip(names, ("its process died of SIGSEGV", "ValueError: two"))
    )


def test_instructions_that_trap(monkeypatch):
    """A peer that dies of SIGILL gets a second try without AMX, unless the user decided."""
    monkeypatch.delenv(peers.ISA_VARIABLE, raising=False)
    tries = []

    def tried(device, names, environment=None):
        tries.append((names, environment))
        trapped = environment is None and peers.ISA_VARIABLE not in os.environ
        why = peers._death(-4) if trapped else None
        return {name: why if "bf16" in name else None for name in names}

    monkeypatch.setattr(peers, "_try", tried)
    assert set(peers._usable("cpu").values()) == {None}
    without = {peers.ISA_VARIABLE: peers.ISA_WITHOUT_AMX}
    assert tries == [(["torch f32", "torch bf16"], None), (["torch bf16"], without)]
    assert os.environ[peers.ISA_VARIABLE] == peers.ISA_WITHOUT_AMX
    del tries[:]
    peers._usable("cpu")
    assert len(tries) == 1


def test_rounds_are_interleaved():
    order = []
    peer = lambda name: peers.Peer(
        name, torch.float32, lambda q, k, v, c: order.append(name) or q + k + v
    )
    entries = bench.run_case(bench.Case(n=8, h=1, hk=1), "cpu", [peer("a"), peer("b")], rounds=3)
    assert order == [
        "a",
        "b",
        "a",
        "b",
        "a",
        "b",
        "b",
        "a",
    ]  # a warm-up each, then turned by one every round
    assert [e["implementation"] for e in entries] == ["sagebwd f32", "a", "b"]
    assert entries[0]["both"]["ratio_to_sagebwd"] == 1.0


def test_the_record_says_which_kernels_ran(monkeypatch):
    monkeypatch.setenv("SAGEBWD_IMPL", "cpu-scalar")
    peer = peers.Peer("other", torch.float32, lambda q, k, v, c: q + k + v)
    ours, other = bench.run_case(bench.Case(n=8, h=1, hk=1), "cpu", [peer], rounds=1)
    assert ours["kernels"] == {"forward": "cpu-scalar", "backward": "cpu-scalar"}
    assert "kernels" not in other


def test_a_peer_is_compared_in_its_own_dtype():
    half = peers.Peer("half", torch.bfloat16, lambda q, k, v, c: q + k + v)
    entries = bench.run_case(bench.Case(n=8, h=1, hk=1), "cpu", [half], rounds=1)
    times = {e["implementation"]: e["both"] for e in entries}
    assert list(times) == ["sagebwd f32", "sagebwd bf16", "half"]
    want = times["half"]["median_ms"] / times["sagebwd bf16"]["median_ms"]
    assert times["half"]["ratio_to_sagebwd"] == pytest.approx(want)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    peer = peers.Peer("other", torch.float32, lambda q, k, v, c: q + k + v)
    entries = bench.run_case(bench.Case(n=8, h=1, hk=1), "cpu", [peer], rounds=1)
    bench.plot(entries, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes()[:4] == b"\x89PNG"


def test_command_line(tmp_path, capsys):
    path = tmp_path / "record.json"
    bench.main(["b1 h2 n64 d32 causal f32", "--rounds", "2", "--json", str(path)])
    text = capsys.readouterr().out
    assert "b1 h2 hk2 n64 d32 causal f32 vectorwise" in text and "torch f32" in text
    record = json.loads(path.read_text())
    assert record["machine"]["torch"] == torch.__version__ and len(record["results"]) >= 2
    times = record["results"][0]["both"]
    assert 0 < times["min_ms"] <= times["median_ms"] <= times["max_ms"]
    assert set(record) >= {"command", "commit", "clean", "date", "machine", "results"}
    with pytest.raises(SystemExit):
        bench.main(["b1 x2"])
