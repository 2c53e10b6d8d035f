# SPDX-License-Identifier: Apache-2.0
"""sagebwd.sla2: SoftTop-k, the router, α, the module and stage 1, against float64."""

import copy
import math

import pytest
import torch
from sla2_reference import branches, mask_gradient, means_of, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sagebwd
from reference import rel
from sagebwd import sla2
from sagebwd.recipe import MATMULS
from sagebwd.sla2.dense import Rows
from sagebwd.sla2.mix import mix

pytestmark = pytest.mark.cpu_only

EXACT = sagebwd.Recipe(high_precision=tuple(MATMULS))


def tensors(b=2, s=300, h=4, d=32, sk=None, hk=None, dtype=torch.float32):
    """q, k, v and dO, tokens before heads. The means of keys are not 0."""
    make = lambda n, heads: torch.randn(b, n, heads, d)
    sk, hk = sk or s, hk or h
    shift = 2 * torch.randn(1, 1, hk, d)
    return [x.to(dtype) for x in (make(s, h), make(sk, hk) + shift, make(sk, hk), make(s, h))]


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def scatter(module):
    """Random numbers instead of what parameters start with."""
    for p in module.parameters():
        p.data = p.data + 0.5 * torch.randn_like(p)
    return module


# --- SoftTop-k ------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3, 17, 256, 2048])
def test_rows_of_soft_top_k_sum_to_k(blocks):
    for k in {1, max(1, blocks // 20), max(1, blocks - 1), blocks}:
        for temperature in (0.01, 0.1, 10.0):
            for scores in (3 * torch.randn(5, blocks), 1000 + torch.randn(5, blocks)):
                m = sla2.soft_top_k(scores, k, temperature)
                assert m.dtype == torch.float32 and 0 <= m.min() and m.max() <= 1
                assert ((m.sum(-1) - k).abs() / k).max() < 1e-5
                # Larger scores have larger entries.
                assert (m.gather(-1, scores.argsort(-1)).diff(dim=-1) >= 0).all()


def test_soft_top_k_of_equal_scores():
    assert torch.allclose(sla2.soft_top_k(torch.full((2, 8), 3.0), 2, 0.1), torch.tensor(0.25))
    # Two of them tie for the last place and share it.
    m = sla2.soft_top_k(torch.tensor([5.0, 1.0, 1.0, -5.0]), 2, 0.01)
    assert torch.allclose(m, torch.tensor([1.0, 0.5, 0.5, 0.0]), atol=1e-6)
    scores = torch.zeros(3, 8, requires_grad=True)
    sla2.soft_top_k(scores, 2, 0.1)[:, 0].sum().backward()
    assert torch.allclose(scores.grad.sum(-1), torch.zeros(3), atol=1e-6)
    assert (scores.grad[:, 0] > 0).all() and (scores.grad[:, 1:] < 0).all()


@pytest.mark.parametrize(("blocks", "k"), [(1, 1), (2, 1), (9, 3), (9, 9), (40, 39)])
def test_gradient_of_soft_top_k(blocks, k):
    scores = torch.randn(2, 3, blocks, dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)[:, None]  # one per row
    assert torch.autograd.gradcheck(lambda x: sla2.soft_top_k(x, k, temperature), scores)


def test_soft_top_k_at_low_temperature_passes_nothing_on():
    scores = torch.tensor([[9.0, 1.0, 0.0]], requires_grad=True)
    sla2.soft_top_k(scores, 1, 1e-3)[0, 0].backward()
    assert torch.equal(scores.grad, torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.randn(2, 4), 0, 0.1), ValueError, "1 to 4"),
        ((torch.randn(2, 4), 5, 0.1), ValueError, "1 to 4"),
        ((torch.randn(2, 4), 2, 0.0), ValueError, "above 0"),
        ((torch.randn(2, 4), 2, math.nan), ValueError, "above 0"),
        ((torch.ones(2, 4).int(), 2, 0.1), TypeError, "floating-point"),
        ((torch.randn(2, 0), 1, 0.1), ValueError, "rows of scores"),
    ],
)
def test_soft_top_k_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        sla2.soft_top_k(*arguments)


# --- router and α ---------------------------------------------------------------------------------


def test_the_router_chooses_by_the_projected_means():
    q, k, v, _ = tensors(s=500, sk=700, hk=2)
    layer = scatter(sla2.Attention(4, 32, kv_heads=2, keep=0.3, always=(7,)))
    qh, kh = (x.double() for x in heads_first(q, k))
    kh = (kh - kh.mean(2, keepdim=True)).repeat_interleave(2, 1)
    scores = (means_of(qh, 128) @ layer.router.wq.double()) @ (
        means_of(kh, 64) @ layer.router.wk.double()
    ).transpose(-1, -2)
    lists = layer.router.lists(q, k, layer.keep)
    assert rel(layer.router.scores(*layer.router.pooled(q, k)), scores / math.sqrt(32)) < 1e-5
    assert lists.index.shape == (2, 4, 4, 3)  # 3 of 11 key blocks
    scores[..., 7] = math.inf
    wanted = torch.zeros_like(scores).scatter(-1, scores.topk(3, -1).indices, 1.0).bool()
    assert torch.equal(lists.to_mask(), wanted)


def test_entries_of_a_list():
    router = sla2.Attention(1, 8, keep=0.05, always=(3, 0, 3, 90)).router
    assert router.entries(0.05, 100) == 5
    assert router.entries(0.05, 20) == 2  # the fixed ones that exist
    assert sla2.Attention(1, 8).router.entries(0.01, 20) == 1  # never none
    assert sla2.Attention(1, 8).router.entries(0.99, 20) == 20


def test_the_table_of_alpha_follows_the_length():
    alpha = sla2.Attention(2, 8, rows=4).alpha
    alpha.logit.data = torch.tensor([[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert torch.equal(alpha.resampled(4), alpha.logit)
    got = alpha.resampled(8)[0]
    assert torch.allclose(got, torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.0]))
    assert torch.allclose(alpha.resampled(2)[0], torch.tensor([0.5, 2.5]))
    assert torch.allclose(alpha.resampled(7)[1], torch.full((7,), 5.0))
    assert sla2.Attention(2, 8, alpha="head").alpha.logit.shape == (2, 1)


# --- the module -----------------------------------------------------------------------------------


def reference_alpha(layer, parameter, q, lse, n):
    """α [b or 1, h, s] in float64 from a copy of the parameter."""
    if isinstance(layer.alpha, type(sla2.Attention(1, 8, alpha="mass").alpha)):
        return torch.sigmoid(lse - n.log() - parameter[:, None])
    rows = torch.arange(q.shape[2]) // layer.router.block_q
    return torch.sigmoid(parameter[:, rows if parameter.shape[1] > 1 else torch.zeros_like(rows)])


def reference_of(layer, q, k, v, dout):
    """out, dq, dk, dv and the gradient of α's parameter, in float64 over the layer's lists."""
    mask = layer.router.lists(q, k, layer.keep).to_mask().double()
    q, k, v, dout = (x.detach().double() for x in heads_first(q, k, v, dout))
    parameter = next(layer.alpha.parameters()).detach().double()
    leaves = [x.clone().requires_grad_() for x in (q, k, v, parameter)]
    pairs = tokens_of(mask, layer.router.block_q, layer.router.block_k, q.shape[2], k.shape[2])
    sparse, lse, linear, n = branches(*leaves[:3], pairs)
    alpha = reference_alpha(layer, leaves[3], q, lse, n).expand(q.shape[:3])[..., None]
    out = alpha * sparse + (1 - alpha) * linear
    return out, *torch.autograd.grad(out, leaves, dout)


CASES = [
    dict(alpha="block", rows=3),
    dict(alpha="head", hk=2, sk=410),
    dict(alpha="mass"),
    dict(alpha="mass", hk=1, b=1, s=129, block_q=64, block_k=128, sk=1000),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("recipe", [EXACT, "vectorwise"], ids=["exact", "int8"])
def test_gradients_of_the_module(case, recipe):
    shape = {"b": 2, "s": 300, "h": 4, **case}
    options = {n: shape.pop(n) for n in ("alpha", "rows", "block_q", "block_k") if n in shape}
    q, k, v, dout = tensors(**shape)
    layer = sla2.Attention(4, 32, kv_heads=shape.get("hk"), keep=0.4, recipe=recipe, **options)
    scatter(layer)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = layer(*leaves)
    got = torch.autograd.grad(out, [*leaves, next(layer.alpha.parameters())], dout)
    want = reference_of(layer, q, k, v, dout)
    assert out.dtype == torch.float32 and out.shape == q.shape
    want = [want[0], *want[1:]]
    want[:4] = heads_first(*want[:4])
    gates = (1e-4,) * 5 if recipe is EXACT else (0.03, 0.03, 0.04, 0.03, 0.04)
    for name, g, w, gate in zip(("out", "dq", "dk", "dv", "dα"), (out, *got), want, gates):
        assert rel(g, w) < gate, f"{name}: {rel(g, w):.2e}"
    assert layer.router.wq.grad is None and not layer.router.wq.requires_grad


def test_bfloat16_and_autocast():
    q, k, v, dout = tensors(s=400, h=2, d=64)
    layer = scatter(sla2.Attention(2, 64, keep=0.4, rows=4))
    want = reference_of(layer, q, k, v, dout)[0].transpose(1, 2)
    half = [x.bfloat16() for x in (q, k, v)]
    out = layer(*half)
    assert out.dtype == torch.bfloat16 and rel(out, want) < 0.03
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(q, k, v), out)


class Large(TorchDispatchMode):
    """The operators that make a float32 tensor of at least this many numbers."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.found = numbers, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                self.found += [str(function)] * (x.numel() >= self.numbers)
        return out


@pytest.mark.parametrize("alpha", ["block", "head"])
def test_no_float32_copies_of_16_bit_tensors(alpha):
    """What stands between the branches is bound by memory on a GPU."""
    q, k, v, dout = tensors(s=512, dtype=torch.bfloat16)
    layer = sla2.Attention(4, 32, keep=0.4, alpha=alpha)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with Large(q.numel()) as large:
        torch.autograd.grad(layer(*leaves), [*leaves, layer.alpha.logit], dout)
    assert large.found == []


@pytest.mark.parametrize("share", [0.1, 0.7, 0.99])
def test_mixing_in_16_bits(share):
    """Results and gradients against float64. Rounding the result alone costs .0017."""
    sparse, linear, dout = (torch.randn(2, 256, 4, 32).bfloat16() for _ in range(3))
    alpha = share + 0.01 * torch.rand(1, 4, 256)
    leaves = [x.requires_grad_() for x in (sparse, linear, alpha)]
    twins = [x.detach().double().requires_grad_() for x in leaves]
    out = mix(*leaves)
    want = twins[2].transpose(1, 2)[..., None] * (twins[0] - twins[1]) + twins[1]
    got = (out, *torch.autograd.grad(out, leaves, dout))
    for a, b in zip(got, (want, *torch.autograd.grad(want, twins, dout.double()))):
        assert rel(a, b) < 0.003


def test_nothing_left_for_the_linear_branch():
    """α counts as 1 where the norm is 0, and has no gradient there."""
    layer = sla2.Attention(2, 8, rows=2)
    norm = torch.tensor([0.0, 1.0]).repeat_interleave(128).expand(3, 2, 256)
    sparse, linear = torch.ones(3, 256, 2, 8), torch.zeros(3, 256, 2, 8)
    out = mix(sparse, linear, *layer.share(sparse, None, None, norm))
    assert (out[:, :128] == 1).all()
    assert torch.allclose(out[:, 128:], torch.tensor(1.0).sigmoid())
    (grad,) = torch.autograd.grad(out.sum(), layer.alpha.logit)
    assert (grad[:, 0] == 0).all() and (grad[:, 1] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("alpha", ["block", "mass"])
def test_compile_checkpointing_and_meta_tensors(alpha):
    q, k, v, _ = tensors(b=1)
    layer = scatter(sla2.Attention(4, 32, keep=0.4, alpha=alpha))
    results = []
    for function in (
        layer,
        torch.compile(layer, backend="aot_eager", fullgraph=True),
        lambda *args: checkpoint(layer, *args, use_reentrant=False),
    ):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for other in results[1:]:
        assert all(rel(a, b) < 1e-5 for a, b in zip(other, results[0]))
    with torch.device("meta"):
        layer, x = sla2.Attention(4, 32, keep=0.4, alpha=alpha), torch.randn(2, 300, 4, 32)
    assert layer(x, x, x).shape == x.shape
    layer.load_state_dict(sla2.Attention(4, 32, alpha=alpha).state_dict(), assign=True)
    assert layer.alpha is not None and layer.router.wq.device.type == "cpu"


@pytest.mark.parametrize(("keep", "s"), [(1, 300), (0.95, 300), (0.05, 60)])
def test_all_blocks_chosen_is_plain_attention(keep, s):
    """keep=1, rounding to all blocks, and a sequence of one block."""
    q, k, v, dout = tensors(s=s)
    layer = scatter(sla2.Attention(4, 32, keep=keep))
    results = []
    for function in (layer, sagebwd.attention):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_one_block_left_out():
    """The smallest complement, one token: no 0/0 and no NaN."""
    q, k, v, dout = tensors(s=65)
    layer = scatter(sla2.Attention(4, 32, keep=0.5, rows=1, recipe=EXACT))
    want = reference_of(layer, q, k, v, dout)
    assert rel(layer(q, k, v), want[0].transpose(1, 2)) < 1e-4


@pytest.mark.parametrize("alpha", ["block", "mass"])
def test_features_that_float32_cannot_hold(alpha):
    """φ(q)·φ(k) underflows to 0; mass gives α = 1 there, and nothing is NaN."""
    q, k, v, dout = tensors(s=200)
    q, k = (400 * torch.eye(32)[torch.randint(0, 16, x.shape[:3])] for x in (q, k))
    k[:, :, :, 16:] = k[:, :, :, :16]
    q = q.requires_grad_()
    layer = sla2.Attention(4, 32, keep=0.3, alpha=alpha, recipe=EXACT)
    out = layer(q, k, v)
    out.backward(dout)
    assert out.isfinite().all() and q.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.alpha.parameters())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(keep=0), ValueError, "above 0"),
        (dict(keep=1.5), ValueError, "up to 1"),
        (dict(keep="all"), ValueError, "a share"),
        (dict(alpha="token"), ValueError, "block, head, mass"),
        (dict(block_q=96), ValueError, "multiple of 64"),
        (dict(block_k=32), ValueError, "multiple of 64"),
        (dict(kv_heads=3), ValueError, "divisor"),
        (dict(rows=0), ValueError, "query blocks"),
        (dict(always=(-1,)), ValueError, "key blocks"),
        (dict(backward="fp8"), ValueError, "bf16"),
        (dict(recipe="quick"), ValueError, "recipe"),
        (dict(causal="yes"), TypeError, "causal"),
    ],
)
def test_refused_options(options, error, words):
    with pytest.raises(error, match=words):
        sla2.Attention(4, 32, **options)


def test_refused_tensors():
    layer = sla2.Attention(4, 32, keep=0.4)
    q, k, v, _ = tensors()
    for args in ((*heads_first(q, k, v),), (q, k[:, :, :2], v[:, :, :2]), (q[0], k[0], v[0])):
        with pytest.raises(ValueError, match="expected"):
            layer(*args)
    with pytest.raises(ValueError, match="keep"):
        layer.keep = 2


def test_states_are_strict():
    layer = scatter(sla2.Attention(4, 32, keep=0.4))
    state = layer.state_dict()
    assert set(state) == {"layout", "router.wq", "router.wk", "alpha.logit"}
    q, k, v, _ = tensors()
    other = sla2.Attention(4, 32, keep=0.4)
    other.load_state_dict(state)
    assert torch.equal(other(q, k, v), layer(q, k, v))
    for changes in (dict(block_k=128), dict(block_q=64), dict(order=(4, 4, 4))):
        with pytest.raises(RuntimeError, match="block sizes and order"):
            sla2.Attention(4, 32, keep=0.4, **changes).load_state_dict(state)
    for changes in (dict(rows=5), dict(alpha="mass")):
        with pytest.raises(RuntimeError, match="alpha"):
            sla2.Attention(4, 32, keep=0.4, **changes).load_state_dict(state)


# --- stage 1 --------------------------------------------------------------------------------------


def test_masks_of_numbers_and_the_gradient_of_the_router():
    """The whole way from Wq and Wk through SoftTop-k to the output, tails included."""
    q, k, v, dout = tensors(s=300, sk=450)
    router = scatter(sla2.Attention(4, 32)).router
    weights = [w.detach().requires_grad_() for w in (router.wq, router.wk)]
    scores = router.scores(*router.pooled(q, k), *weights)
    scores.retain_grad()
    mask = sla2.soft_top_k(scores, 2, 0.3)
    mask.retain_grad()
    rows = Rows(q, k, v, torch.arange(3), 128, 64)
    alpha = torch.rand(2, 4, 300)
    padded = torch.nn.functional.pad(alpha, (0, 84)).unflatten(2, (3, 128))
    out = rows.out(mask, lambda lse, norm: padded)
    flat = lambda x: x.flatten(2, 3)[:, :, :300]
    (flat(out) * dout.transpose(1, 2)).sum().backward()

    qd, kd, vd, dd = (x.double() for x in heads_first(q, k, v, dout))
    m = mask.detach().double()
    sparse, _, linear, _ = branches(qd, kd, vd, tokens_of(m, 128, 64, 300, 450))
    share = alpha.double()[..., None]
    assert rel(flat(out), share * sparse + (1 - share) * linear) < 1e-5
    full = sagebwd.attention(q, k, v, recipe=EXACT)
    assert rel(flat(rows.full), full.transpose(1, 2)) < 1e-5
    dm = mask_gradient(qd, kd, vd, m, alpha.double(), dd, 128, 64)
    assert rel(mask.grad, dm) < 1e-4
    g = m * (1 - m)
    dx = g / 0.3 * (dm - (g * dm).sum(-1, keepdim=True) / g.sum(-1, keepdim=True))
    assert rel(scores.grad, dx) < 1e-4
    qm, km = means_of(qd, 128), means_of(kd - kd.mean(2, keepdim=True), 64)
    wq, wk = (w.detach().double() for w in weights)
    dx = dx / math.sqrt(32)
    wanted = (
        (qm.transpose(-1, -2) @ dx @ km @ wk).sum(0),
        (km.transpose(-1, -2) @ dx.transpose(-1, -2) @ qm @ wq).sum(0),
    )
    for w, want in zip(weights, wanted):
        assert rel(w.grad, want) < 1e-4


@pytest.mark.parametrize("alpha", ["block", "mass"])
def test_hard_masks_in_stage_1_are_the_module(alpha):
    q, k, v, _ = tensors(b=1, s=300)
    layer = scatter(sla2.Attention(4, 32, keep=0.4, alpha=alpha, rows=3, recipe=EXACT))
    mask = layer.router.lists(q, k, 0.4).to_mask().float()
    some = torch.tensor([2, 0])
    rows = Rows(q, k, v, some, 128, 64)
    shares = lambda lse, norm: (
        layer.alpha(lse, norm) if alpha == "mass" else layer.alpha(3)[None, :, some, None]
    )
    out = rows.out(mask[:, :, some], shares)
    want = layer(q, k, v).transpose(1, 2)
    assert rel(out[:, :, 1], want[:, :, :128]) < 1e-4
    assert rel(out[:, :, 0, :44], want[:, :, 256:]) < 1e-4
    assert rows.valid.sum() == 128 + 44


class Toy(torch.nn.Module):
    """A layer whose q, k and v are its input."""

    def __init__(self, heads=2, d=16, **options):
        super().__init__()
        self.attend = sla2.Attention(heads, d, **options)

    def forward(self, q, k, v):
        return self.attend(q, k, v)


def misleading(b=2, s=1024, heads=2, d=16):
    """Keys of four blocks of 16 vary more than the others, so these blocks have most of every row.
    Their means do not tell, but for the first channel, which the router can learn to look at."""
    block = lambda n, scale: scale * torch.randn(b, n, heads, d).repeat_interleave(s // n, 1)
    loud = (torch.rand(b, 16, heads, 1).argsort(1) < 4).float().repeat_interleave(s // 16, 1)
    q, k = block(8, 1.0), block(16, 0.5)
    k = k + (0.5 + 2 * loud) * torch.randn(b, s, heads, d)
    q[..., :1], k[..., :1] = 1.0, loud
    return q, k, torch.randn(b, s, heads, d) + block(16, 1.0)


@pytest.mark.slow
def test_stage_1_finds_a_better_router():
    """The ordering of the hard error: identity router with α fitted > trained router."""
    model = Toy(keep=0.25, rows=8)
    before = copy.deepcopy(model.state_dict())
    batches = [misleading() for _ in range(8)]
    seen = []
    table = sla2.fit(model, batches, steps=60, lr=1e-2, report=seen.append)
    (layer,) = table
    assert seen == [layer] and layer.name == "attend" and "attend" in str(table)
    assert all(t < 0.97 * i for t, i in zip(layer.trained, layer.identity)), str(table)
    assert layer.kept == [True, True] and layer.error == layer.trained
    assert all(0 <= s < 0.5 for s in layer.softness)
    # What it reports is what the module gives. α alone was worth something too.
    q, k, v = batches[-1]
    full = sagebwd.attention(q, k, v, recipe=EXACT)
    errors = lambda: [rel(model(q, k, v)[:, :, h], full[:, :, h]) for h in range(2)]
    assert errors() == pytest.approx(layer.error, rel=1e-3)
    model.load_state_dict(before)
    assert all(e > i for e, i in zip(errors(), layer.identity))
    assert model.attend.keep == 0.25 and not model.attend.router.wq.requires_grad


def test_a_head_that_did_not_improve_keeps_the_identity():
    """Learning rates far too large spoil every router."""
    model = Toy(keep=0.25, rows=8)
    (layer,) = sla2.fit(model, [misleading() for _ in range(2)], steps=3, lr=1e6)
    assert layer.kept == [False, False] and layer.error == layer.identity
    eye = torch.eye(16).expand(2, -1, -1)
    assert torch.equal(model.attend.router.wq, eye) and torch.equal(model.attend.router.wk, eye)


def test_fit_refuses():
    batches = [misleading(s=256) for _ in range(2)]
    with pytest.raises(ValueError, match="found none; sla2.convert"):
        sla2.fit(torch.nn.Linear(2, 2), batches)
    with pytest.raises(ValueError, match="held out"):
        sla2.fit(Toy(), batches[:1])
    with pytest.raises(ValueError, match="keep below 1"):
        sla2.fit(Toy(keep=1), batches)
    with pytest.raises(ValueError, match="steps"):
        sla2.fit(Toy(), batches, steps=0)
