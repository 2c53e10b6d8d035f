# SPDX-License-Identifier: Apache-2.0
"""Both branches of sparse-linear attention as one operator, against the branches one by one and
against float64. On a CPU the operator mixes in a step of its own; SAGEBWD_TEST_DEVICE=cuda runs the
kernels that mix."""

import pytest
import torch
from sla2_reference import branches, tokens_of
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from reference import rel
from sagebwd import BlockLists, linear_attention, sla2
from sagebwd._ops import sla2 as operators

NAMES = ("out", "dq", "dk", "dv", "dα")
#: One by one, outputs and gradients of branches are rounded to 16 bits before they are added.
GATE = 1e-2
#: (layer options, shape of the call)
CASES = {
    "block": (dict(alpha="block", rows=5), dict(s=600)),
    "other length": (dict(alpha="block", rows=7), dict(s=513)),
    "head": (dict(alpha="head"), dict(s=600)),
    "grouped": (dict(alpha="block", rows=5, kv_heads=2), dict(s=600)),
    "causal": (dict(alpha="block", rows=5, causal=True), dict(s=600)),
    "short blocks": (dict(alpha="block", rows=9, block_q=64), dict(s=550)),
    "long blocks": (dict(alpha="block", rows=3, block_q=256, block_k=128), dict(s=700)),
    "always": (dict(alpha="block", rows=5, always=(0, 2)), dict(s=600)),
}


def make(options, s, b=2, h=4, d=64, dtype=torch.bfloat16, keep=0.3):
    layer = sla2.Attention(h, d, keep=keep, deterministic=True, **options)
    with torch.no_grad():
        for p in layer.alpha.parameters():
            p.add_(torch.randn_like(p))
    heads = (h, layer.kv_heads, layer.kv_heads, h)
    return layer, [torch.randn(b, s, n, d).to(dtype) for n in heads]


def results(layer, call, q, k, v, dout):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = layer.router.route(q, k, layer.keep)
    out = call(*leaves, *found)
    return out, *torch.autograd.grad(out, [*leaves, layer.alpha.logit], dout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_branches_one_by_one(name, dtype):
    options, sizes = CASES[name]
    layer, tensors = make(options, dtype=dtype, **sizes)
    together = results(layer, layer.together, *tensors)
    apart = results(layer, layer.apart, *tensors)
    for which, a, b in zip(NAMES, together, apart):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride(), which
        assert rel(a, b) < GATE, f"{which}: {rel(a, b):.1e}"


@pytest.mark.parametrize("d", [32, 64, 128])
def test_matches_float64(d):
    """With head dims that no kernel mixes, too."""
    layer, (q, k, v, dout) = make(dict(alpha="block", rows=5), s=600, d=d)
    lists, _ = layer.router.route(q, k, layer.keep)
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    logit = layer.alpha.logit.detach().double().requires_grad_()
    sparse, _, linear, n = branches(*leaves, tokens_of(lists.to_mask().double(), 128, 64, 600, 600))
    share = torch.sigmoid(logit).repeat_interleave(128, 1)[None, :, :600].expand_as(n)[..., None]
    out = share * sparse + (1 - share) * linear
    grads = torch.autograd.grad(out, [*leaves, logit], dout.double().transpose(1, 2))
    want = (*(x.transpose(1, 2) for x in (out, *grads[:3])), grads[3])
    for which, a, b in zip(NAMES, results(layer, layer.together, q, k, v, dout), want):
        assert rel(a, b) < 0.04, f"{which}: {rel(a, b):.2e}"


def test_the_module_takes_it_where_a_kernel_mixes(monkeypatch):
    layer, (q, k, v, _) = make(dict(alpha="block", rows=5), s=600)
    assert operators.mixes(q) == q.is_cuda
    asked = []
    monkeypatch.setattr(operators, "mixes", lambda q: asked.append(q) or True)
    found = layer.router.route(q, k, layer.keep)
    assert torch.equal(layer(q, k, v), layer.together(q, k, v, *found)) and asked
    layer = sla2.Attention(4, 64, alpha="mass", keep=0.3)  # α of norms
    found = layer.router.route(q, k, layer.keep)
    assert torch.equal(layer(q, k, v), layer.apart(q, k, v, *found))


@pytest.mark.slow
@pytest.mark.parametrize("block_q", [64, pytest.param(128, marks=pytest.mark.long)])
def test_compile_and_checkpointing(monkeypatch, block_q):
    monkeypatch.setattr(operators, "mixes", lambda q: True)
    layer, (q, k, v, dout) = make(dict(alpha="block", rows=5, block_q=block_q), s=600)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = []
    for call in (layer, compiled, lambda *x: checkpoint(layer, *x, use_reentrant=False)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = call(*leaves)
        got.append((out, *torch.autograd.grad(out, [*leaves, layer.alpha.logit], dout)))
    for other in got[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other[:4], got[0]))
        # Where blocks share places of the table, PyTorch adds up their gradients in any order.
        assert rel(other[4], got[0][4]) < 1e-6


@pytest.mark.long
def test_compiles_where_there_is_a_default_device():
    layer, (q, k, v, _) = make(dict(alpha="block", rows=5), s=600)
    with torch.device(q.device):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q, k, v), layer(q, k, v))


def test_gradients_that_nobody_wants():
    layer, (q, k, v, dout) = make(dict(alpha="block", rows=5), s=600)
    found = layer.router.route(q, k, layer.keep)
    with torch.no_grad():
        want = layer.together(q, k, v, *found)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    both = results(layer, layer.together, q, k, v, dout)
    assert torch.equal(want, both[0])
    layer.alpha.logit.requires_grad_(False)
    out = layer.together(*leaves, *found)
    for a, b in zip(torch.autograd.grad(out, leaves, dout), both[1:4]):
        assert torch.equal(a, b)
    # α alone, and an expanded gradient.
    layer.alpha.logit.requires_grad_(True)
    out = layer.together(q, k, v, *found)
    (grad,) = torch.autograd.grad(out.sum(), layer.alpha.logit)
    assert rel(grad, results(layer, layer.apart, q, k, v, torch.ones_like(dout))[4]) < GATE


def test_refuses_to_be_differentiated_twice():
    layer, (q, k, v, _) = make(dict(alpha="block", rows=5), s=600)
    found = layer.router.route(q, k, layer.keep)
    leaf = q.detach().requires_grad_()
    out = layer.together(leaf, k, v, *found)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()


def test_recipes_of_the_sparse_branch():
    """The 16-bit backward, and a recipe that keeps no codes."""
    for options in (dict(backward="bf16"), dict(recipe="paper")):
        layer, tensors = make(dict(alpha="block", rows=5, **options), s=300)
        together = results(layer, layer.together, *tensors)
        for which, a, b in zip(NAMES, together, results(layer, layer.apart, *tensors)):
            assert rel(a, b) < GATE, f"{options}, {which}: {rel(a, b):.1e}"


def test_operators_are_sound():
    layer, (q, k, v, _) = make(dict(alpha="block", rows=3), s=300, b=1)
    lists, _ = layer.router.route(q, k, layer.keep)
    tensors = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    alpha = torch.rand(1, 4, 3, requires_grad=True)
    options = operators.Options(
        *(False, "vectorwise", 0, lists.index, lists.count, 1, lists.index, lists.count),
        *(128, 64, True, 128, True),
    )
    torch.library.opcheck(
        torch.ops.sagebwd.sla2_fwd.default,
        (*tensors, alpha, *options, True, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_sizes_and_operations():
    """What fake tensors say of averages, and what is counted."""
    layer, (q, k, v, dout) = make(dict(alpha="block", rows=5), s=600)
    counts = []
    for call in (layer.together, layer.apart):
        with FlopCounterMode(display=False) as counter:
            results(layer, call, q, k, v, dout)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    q, k = (x.transpose(1, 2) for x in (q, k))
    assert operators.averages_bytes(q, k, 128) == 2 * 4 * (5 * (64 * 64 * 2 + 64 * 4) + 64 * 8 + 4)


@pytest.mark.parametrize("sizes", [dict(s=600), dict(s=130, d=32, kv_heads=2), dict(s=64, b=1)])
def test_fake_tensors_know_the_size_of_averages(sizes):
    options, sizes = dict(alpha="head", kv_heads=sizes.get("kv_heads")), dict(sizes)
    sizes.pop("kv_heads", None)
    _, (q, k, v, _) = make(options, **sizes)
    rows, columns = -(-q.shape[1] // 128), -(-q.shape[1] // 64)
    lists = BlockLists.from_mask(torch.ones(1, 1, rows, columns, dtype=torch.bool))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = operators.Options(
        *(False, "vectorwise", 0, lists.index, lists.count, 1, lists.index, lists.count),
        *(128, 64, True, 128, True),
    )
    alpha = torch.rand(1, 4, rows)
    *_, averages = torch.ops.sagebwd.sla2_fwd.default(q, k, v, alpha, *options, False, True)
    assert averages.numel() == operators.averages_bytes(q, k, 128)


@pytest.mark.parametrize("recipe", ["vectorwise", "paper", "vectorwise smooth_k=off"])
def test_codes_of_the_sparse_branch(recipe):
    """Kernels that mix take the means of k and v from them, wherever a recipe puts those."""
    layer, tensors = make(dict(alpha="head", kv_heads=2, recipe=recipe), s=300)
    together = results(layer, layer.together, *tensors)
    for which, a, b in zip(NAMES, together, results(layer, layer.apart, *tensors)):
        assert rel(a, b) < GATE, f"{which}: {rel(a, b):.1e}"


def test_an_implementation_without_a_linear_branch_refuses(monkeypatch):
    layer, (q, k, v, _) = make(dict(alpha="head"), s=300)
    found = layer.router.route(q, k, layer.keep)
    pinned = "cpu-scalar" if q.is_cuda else "cuda-plain"
    monkeypatch.setenv("SAGEBWD_IMPL", pinned)
    with pytest.raises(NotImplementedError, match=f"SAGEBWD_IMPL pins {pinned}|on CPU memory only"):
        layer(q, k, v)
    with pytest.raises(NotImplementedError, match=f"SAGEBWD_IMPL pins {pinned}"):
        linear_attention(q, k, v, exclude=found[1])


def test_nothing_left_and_empty_tensors():
    """Rows of a causal call that have nothing before them, and a batch of none."""
    layer, tensors = make(dict(alpha="block", rows=3, causal=True), s=384)
    out, *grads = results(layer, layer.together, *tensors)
    assert all(x.isfinite().all() for x in (out, *grads))
    q, k, v = (x[:0] for x in tensors[:3])
    found = sla2.Attention(4, 64, keep=0.3).router.route(q, k, 0.3)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    layer = sla2.Attention(4, 64, keep=0.3)
    out = layer.together(*leaves, *found)
    grads = torch.autograd.grad(out.sum(), [*leaves, layer.alpha.logit])
    assert out.shape == q.shape and (grads[3] == 0).all()
