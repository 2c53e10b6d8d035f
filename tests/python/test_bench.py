# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs, interleaves, and writes what it measured."""

import contextlib
import json
import os
import statistics
import sys
import types

import pytest
import torch

from sagebwd.tools import bench, peers, timing


def test_case_text():
    case = bench.Case.parse("b2 h8 hk2 n300 d64 causal bf16 paper")
    assert str(case) == "b2 h8 hk2 n300 d64 causal bf16 paper"
    assert bench.Case.parse("n8 h3").hk == 3
    assert bench.Case.parse("n8 paper").recipe == "paper"
    assert case.flops("both") == 7 * 2 * 2 * 8 * (300 * 301 // 2) * 64
    with pytest.raises(ValueError, match="'window'"):
        bench.Case.parse("n8 window")
    packed = bench.Case.parse("b2 n64 causal documents")
    assert str(packed) == "b2 h8 hk8 n64 d64 causal documents f32 vectorwise"
    assert packed.offsets("cpu").tolist() == [0, 4, 12, 32, 64, 68, 76, 96, 128]
    assert packed.flops("forward") == 2 * 2 * 2 * 8 * (10 + 36 + 210 + 528) * 64
    with pytest.raises(ValueError, match="16 divides"):
        bench.Case.parse("n100 documents")


@pytest.mark.slow
def test_peers_compute_attention():
    found, missing = peers.find("cpu")
    assert {p.name for p in found} | set(missing) == {"torch f32", "torch bf16"}
    q, k, v = torch.randn(1, 4, 20, 32), torch.randn(1, 2, 20, 32), torch.randn(1, 2, 20, 32)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    for peer in found:
        with peer.context():
            out = peer.call(*(t.to(peer.dtype) for t in (q, k, v)), True)
        torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02)


def test_default_cases():
    cases = [bench.Case.parse(text) for text in bench.DEFAULT_CASES["cpu"]]
    assert {(c.b, c.h, c.n, c.d, c.causal, c.recipe) for c in cases} == {
        (1, 8, 4096, d, causal, "vectorwise") for d in (64, 128) for causal in (True, False)
    }


@pytest.mark.slow
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
        *("a", "b"),  # whether they run the case at all
        *("a", "b"),  # a warm-up each
        *("a", "b"),
        *("a", "b"),
        *("b", "a"),
    ]  # the rounds begin with this library, then with a, then with b
    assert [e["implementation"] for e in entries] == ["sagebwd f32", "a", "b"]
    assert entries[0]["both"]["ratio_to_sagebwd"] == 1.0


def test_a_peer_that_refuses_a_case_is_left_out_of_it():
    def call(q, k, v, causal):
        if q.shape[1] != k.shape[1]:
            raise RuntimeError("no grouped queries\nsecond line")
        return q + k + v

    peer, refused = peers.Peer("other", torch.float32, call), {}
    names = lambda case: [
        e["implementation"] for e in bench.run_case(case, "cpu", [peer], 1, refused=refused)
    ]
    assert names(bench.Case(n=8, h=2, hk=1)) == ["sagebwd f32"]
    case = "b1 h2 hk1 n8 d64 full f32 vectorwise"
    assert refused == {f"other, {case}": "RuntimeError: no grouped queries"}
    assert names(bench.Case(n=8, h=2, hk=2)) == ["sagebwd f32", "other"]
    assert len(refused) == 1


def test_packed_documents():
    """This library gets the documents of the case, and so does a peer that takes them."""
    seen = []

    def packed(q, k, v, causal, offsets, shortest, longest):
        seen.append((q.shape, causal, offsets.tolist(), shortest, longest))
        return q + k + v

    takes = peers.Peer("takes", torch.float32, None, packed)
    other = peers.Peer("other", torch.float32, lambda q, k, v, c: q + k + v)
    case = bench.Case.parse("b2 h2 n32 d64 causal documents")
    entries = bench.run_case(case, "cpu", [takes, other], 1)
    assert [e["implementation"] for e in entries] == ["sagebwd f32", "takes"]
    assert seen[0] == ((64, 2, 64), True, [0, 2, 6, 16, 32, 34, 38, 48, 64], 2, 16)
    ours = bench.contestants(case, "cpu", [])[0]
    q, k, v = (t.detach().transpose(0, 1) for t in ours.leaves)
    with torch.no_grad():
        got = ours.forward()[38:48].transpose(0, 1)
    rows = lambda t: t[:, 38:48]
    want = torch.nn.functional.scaled_dot_product_attention(
        rows(q), rows(k), rows(v), is_causal=True
    )
    assert (got - want).norm() < 0.05 * want.norm()


def test_sustained_load(monkeypatch):
    """Each has the device for itself for a while, and what went by before the clock settled is not
    counted. Here each call is faster than the one before it."""
    now, calls, laps = [0.0], [], []
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow:
        times = {d: [] for d in timing.DIRECTIONS}
        context = contextlib.nullcontext

        def forward(self):
            calls.append("forward")
            laps.append(0.04 * 0.95 ** len(laps))
            now[0] += laps[-1]

        def backward(self, out, retain_graph=False):
            calls.append("retained" if retain_graph else "backward")
            now[0] += 0.1

    slow = Slow()
    timing.sustained([slow], "cpu", 1)
    in_forward = calls.index("retained") - 1  # one more forward makes the graph of the backwards
    assert sum(laps[:in_forward]) >= timing.BUSY_SECONDS > sum(laps[: in_forward - 1])
    want = statistics.median(laps[in_forward // 3 : in_forward])
    assert slow.times["forward"] == [pytest.approx(want)]
    assert calls[in_forward:][:7] == ["forward", *["retained"] * 5, "forward"]
    assert slow.times["backward"] == [pytest.approx(0.1)]
    assert calls[in_forward + 6 :][:4] == ["forward", "backward", "forward", "backward"]


@pytest.mark.cpu_only
def test_sustained_load_of_a_device(monkeypatch):
    """With a device that takes 10 ms for a call, while the host takes 1 ms: few calls are waiting
    at any time, and the laps are the device's."""
    host, device, waiting = [0.0], [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = device[0]

        def synchronize(self):
            host[0] = max(host[0], self.at)

        def elapsed_time(self, later):
            return 1e3 * (later.at - self.at)

    def call():
        host[0] += 0.001
        device[0] = max(device[0], host[0]) + 0.010
        waiting.append((device[0] - host[0]) / 0.010)

    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: host[0]))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    laps = timing._busy_laps(call, "cuda")
    assert laps[1:] == pytest.approx([0.010] * (len(laps) - 1))
    assert timing.BUSY_SECONDS <= sum(laps) < timing.BUSY_SECONDS + 0.010 * (timing.QUEUED + 2)
    assert 2 < max(waiting) <= timing.QUEUED + 1


def test_eager_calls(monkeypatch):
    """Wall time per call, without a graph in the forward; the backward alone is not timed."""
    monkeypatch.setattr(timing, "EAGER_CALLS", 5)
    graphs = []
    peer = peers.Peer("a", torch.float32, lambda q, k, v, c: graphs.append(_grad()) or q + k + v)
    _grad = torch.is_grad_enabled
    entries = bench.run_case(bench.Case(n=8, h=1, hk=1), "cpu", [peer], 2, "eager")
    # One try, then three rounds of five calls in each direction, the first of which warms up.
    assert graphs == [True] + [False] * 15 + [True] * 15
    for entry in entries:
        assert set(entry) & set(bench.DIRECTIONS) == {"forward", "both"}
        assert entry["both"]["median_ms"] > 0
    text = bench.table(entries)
    assert "forward ms" in text and "both ms" in text and "backward" not in text


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


@pytest.mark.slow
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
    assert (record["timing"], record["rounds"]) == ("bursts", 2)
    with pytest.raises(SystemExit):
        bench.main(["b1 x2"])
