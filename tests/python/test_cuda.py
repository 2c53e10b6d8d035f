# SPDX-License-Identifier: Apache-2.0
"""What only a GPU has: graphs, streams, and calls that do not wait."""

import pytest
import torch
from reference import check, exact_grads, visible

import sagebwd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = ("out", "dq", "dk", "dv")


def tensors(s=300, d=64, h=4, dtype=torch.bfloat16):
    make = lambda: torch.randn(2, s, h, d, device="cuda", dtype=dtype)
    return [make().requires_grad_() for _ in range(3)], make()


def step(leaves, dout, **options):
    out = sagebwd.attention(*leaves, causal=True, deterministic=True, **options)
    return (out, *torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("recipe", ["vectorwise", "paper"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_matches_exact_attention(recipe, d):
    leaves, dout = tensors(d=d)
    s = dout.shape[1]
    heads_first = [t.detach().transpose(1, 2) for t in (*leaves, dout)]
    want = exact_grads(*heads_first, mask=visible(s, s, True).cuda())
    gate = 0.03 if recipe == "vectorwise" else 0.12
    for name, a, b in zip(NAMES, step(leaves, dout, recipe=recipe), (want[0], *want[2:])):
        check(name, a.transpose(1, 2), b, gate)


def test_graph_replays_the_same_bits():
    leaves, dout = tensors()
    eager = step(leaves, dout)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd and the allocator warm up outside the capture
        step(leaves, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaves, dout)
    for name, t in zip(NAMES, captured):
        t.detach().fill_(float("nan"))
    graph.replay()
    for name, a, b in zip(NAMES, captured, eager):
        assert torch.equal(a, b), name
    with torch.no_grad():  # new values in the same memory
        for t in leaves:
            t.copy_(torch.randn_like(t))
    graph.replay()
    for name, a, b in zip(NAMES, captured, step(leaves, dout)):
        assert torch.equal(a, b), name


def test_calls_do_not_wait():
    leaves, dout = tensors()
    step(leaves, dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(leaves, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_do_not_disturb_each_other():
    problems = [tensors(s) for s in (257, 640)]
    alone = [step(*p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(10):
        torch.cuda.synchronize()
        together = []
        for stream, p in zip(streams, problems):
            with torch.cuda.stream(stream):
                together.append(step(*p))
        torch.cuda.synchronize()
        for a, b in zip(alone, together):
            for name, x, y in zip(NAMES, a, b):
                assert torch.equal(x, y), name


def test_compiled_with_graphs():
    leaves, dout = tensors(s=256)
    compiled = torch.compile(
        lambda q, k, v: sagebwd.attention(q, k, v, causal=True, deterministic=True),
        mode="reduce-overhead",
        fullgraph=True,
    )
    want = step(leaves, dout)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*leaves)
        got = (out.clone(), *(g.clone() for g in torch.autograd.grad(out, leaves, dout)))
    for name, a, b in zip(NAMES, got, want):
        assert torch.equal(a, b), name


def test_other_devices_are_refused():
    q = torch.randn(1, 16, 2, 64)
    with pytest.raises(ValueError, match="device"):
        sagebwd.attention(q.cuda(), q.cpu(), q.cuda())
