# SPDX-License-Identifier: Apache-2.0
"""The benchmark of block lists and SLA2: its contestants, its record, and the table made of it."""

import importlib.util
import json
import os
import pathlib

import pytest
import torch

from sagebwd import BlockLists
from sagebwd.tools import bench_sparse, peers

TABLES = pathlib.Path(__file__).resolve().parents[2] / "tools" / "tables.py"


def test_the_cases_of_the_record():
    assert set(bench_sparse.CASES) == {
        "h16 n32768 d128",
        "h32 n32768 d64",
        "h16 n8192 d128",
        "h32 n8192 d64",
    }
    assert bench_sparse.SPARSITIES == (0.8, 0.9, 0.95, 0.97)


def test_block_mask_has_the_blocks_of_the_lists():
    """From both sides: FlexAttention's forward walks keys, its backward queries too."""
    torch.manual_seed(0)
    lists = BlockLists.top_k(torch.randn(1, 2, 4, 8), k=3)
    mask = bench_sparse.block_mask(lists, 500)
    listed = lists.to_mask()
    assert (mask.to_dense().bool() == listed).all()
    assert mask.BLOCK_SIZE == (128, 64) and mask.shape == (1, 2, 500, 500)
    # Whole blocks, which need no mask inside.
    assert mask.kv_num_blocks.sum() == mask.q_num_blocks.sum() == 0
    assert (mask.full_q_num_blocks == listed.sum(-2)).all()
    count, index = mask.full_q_num_blocks, mask.full_q_indices
    for head in range(2):
        for block in range(8):
            rows = index[0, head, block, : count[0, head, block]].tolist()
            assert sorted(rows) == listed[0, head, :, block].nonzero().flatten().tolist()


def test_record_and_table(tmp_path, monkeypatch):
    """A run at toy size; one peer refuses."""

    def refuses(q, k, v, causal):
        raise RuntimeError("no such kernel")

    found = [
        peers.Peer("torch cudnn bf16", torch.bfloat16, lambda q, k, v, causal: q + k + v),
        peers.Peer("torch flash bf16", torch.bfloat16, refuses),
    ]
    absent = {"torch other": "is not here"}
    monkeypatch.setattr(peers, "find", lambda device, wanted: (found, absent))
    monkeypatch.setattr(bench_sparse, "_find_flex", lambda device: (None, "is not built"))
    out = tmp_path / "results" / "gpu" / "sparse.json"
    out.parent.mkdir(parents=True)
    bench_sparse.main(
        ["h2 n512 d32", "--device=cpu", "--sparsity=.5,.75", "--rounds=2", f"--json={out}"]
    )
    record = json.loads(out.read_text())
    assert {(e["implementation"], e["sparsity"]) for e in record["results"]} == {
        ("sagebwd dense", None),
        ("torch cudnn", None),
        ("sagebwd sla2", 0.5),
        ("sagebwd sparse", 0.5),
        ("sagebwd sla2", 0.75),
        ("sagebwd sparse", 0.75),
    }
    for e in record["results"]:
        assert e["case"] == "h2 n512 d32"
        for direction in ("forward", "backward", "both"):
            assert 0 < e[direction]["min_ms"] <= e[direction]["median_ms"]
    assert record["missing"] == {
        "torch other": "is not here",
        "flex": "is not built",
        "torch flash, h2 n512 d32": "RuntimeError: no such kernel",
    }

    for e in record["results"]:
        e["implementation"] = e["implementation"].replace("dense", "dense cuda-sm80")
        base = {"sagebwd dense cuda-sm80": 40.0, "torch cudnn": 30.0, "sagebwd sla2": 2.0}
        for direction, factor in (("forward", 1), ("backward", 3)):
            e[direction]["median_ms"] = base.get(e["implementation"], 11.0) * factor
    record["machine"] = {"gpu": "a GPU", "torch": "2"}
    record.update(command="x", commit="0123456789", clean=True, date="today")
    out.write_text(json.dumps(record))
    spec = importlib.util.spec_from_file_location("tables", TABLES)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    ratios = "15.00 / 15.00 | – | –"
    row = f"| h2 n512 d32 | 75 % | 2.00 / 6.00 | {ratios} | 11.00 / 33.00 | 1.10 / 1.10 |"
    assert row in tables.sparse().splitlines()
    out.unlink()
    assert "Not recorded yet" in tables.sparse()


def test_our_own_failure_is_not_left_out(monkeypatch):
    monkeypatch.setattr(bench_sparse, "_trial", lambda c: "it broke")
    case = bench_sparse.Case(2, 512, 32, "cpu")
    with pytest.raises(RuntimeError, match="sagebwd dense.*it broke"):
        bench_sparse.run_case(case, [0.5], [], None, 1)


def test_bad_words(capsys, monkeypatch):
    monkeypatch.setattr(peers, "find", lambda device, wanted: ([], {}))
    for arguments, words in (
        (["h2 n512"], "expected a text such as"),
        (["h2 n512 d32 causal"], "expected a text such as"),
        (["h2 n512 d32", "--sparsity=much"], "expected numbers"),
        (["h2 n64 d32", "--sparsity=.9"], "too short"),
    ):
        with pytest.raises(SystemExit):
            bench_sparse.main([*arguments, "--device=cpu"])
        assert words in capsys.readouterr().err


def test_pinned(monkeypatch):
    monkeypatch.delenv("SAGEBWD_IMPL", raising=False)
    with bench_sparse.pinned("one"):
        with bench_sparse.pinned("two"):
            assert os.environ["SAGEBWD_IMPL"] == "two"
        assert os.environ["SAGEBWD_IMPL"] == "one"
    assert "SAGEBWD_IMPL" not in os.environ
