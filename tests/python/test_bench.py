# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs, interleaves, and writes what it measured."""

import json

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
