# SPDX-License-Identifier: Apache-2.0
"""sagebwd.sla2 on a GPU: right, without host waits, and captured into a graph."""

import pytest
import torch
from sla2_reference import branches, tokens_of

from reference import rel
from sagebwd import sla2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = ("out", "dq", "dk", "dv", "dα")


def case(alpha, s=700, h=4, d=64, **options):
    make = lambda: torch.randn(2, s, h, d, device="cuda", dtype=torch.bfloat16)
    options = dict(keep=0.3, alpha=alpha, rows=6, deterministic=True, device="cuda", **options)
    return sla2.Attention(h, d, **options), [make() for _ in range(3)], make()


def step(layer, tensors, dout):
    # New leaves each time: the node that collects a leaf's gradient keeps the stream of its birth.
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = layer(*leaves)
    parameter = next(layer.alpha.parameters())
    return (out, *torch.autograd.grad(out, [*leaves, parameter], dout))


@pytest.mark.parametrize("alpha", ["block", "mass"])
@pytest.mark.parametrize("causal", [False, True])
def test_matches_float64(alpha, causal):
    layer, tensors, dout = case(alpha, causal=causal)
    lists, excluded = layer.router.route(*tensors[:2], layer.keep)
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in tensors]
    parameter = next(layer.alpha.parameters()).detach().double().requires_grad_()
    listed, left = (
        tokens_of(mask.double(), 128, 64, 700, 700)
        for mask in (lists.to_mask(), ~excluded.to_mask())
    )
    if causal:
        sparse, lse, linear, n = branches(*leaves, listed.tril(), left)
    else:
        sparse, lse, linear, n = branches(*leaves, listed)
    if alpha == "mass":
        share = torch.sigmoid(lse - n.where(n > 0, 1.0).log() - parameter[:, None])
    else:
        share = torch.sigmoid(parameter).repeat_interleave(128, 1)[None, :, :700]
    share = share.expand_as(n).where(n > 0, 1.0)
    want = torch.lerp(linear, sparse, share[..., None].expand_as(sparse))
    grads = torch.autograd.grad(want, [*leaves, parameter], dout.double().transpose(1, 2))
    got = step(layer, tensors, dout)
    turned = [x.transpose(1, 2) for x in (want, *grads[:3])]
    for name, a, b in zip(NAMES, got, (*turned, grads[3])):
        assert rel(a, b) < 0.04, f"{name}: {rel(a, b):.2e}"


@pytest.mark.parametrize("alpha", ["block", "head", "mass"])
@pytest.mark.parametrize("causal", [False, True])
def test_calls_do_not_wait(alpha, causal):
    args = case(alpha, causal=causal, always=(0,))
    step(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("alpha", ["block", "mass"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_takes_new_values(alpha, causal):
    """Router, lists and both branches: a replay chooses other blocks for other values."""
    layer, tensors, dout = case(alpha, causal=causal)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layer, tensors, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, tensors, dout)
    for t in tensors:
        t.copy_(torch.randn_like(t))
    graph.replay()
    for name, a, b in zip(NAMES, captured, step(layer, tensors, dout)):
        assert rel(a, b) < 1e-3, name
