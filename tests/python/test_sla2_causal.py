# SPDX-License-Identifier: Apache-2.0
"""sla2.Attention(causal=True): against float64, and that no later token has any influence."""

import math

import pytest
import torch
from sla2_reference import branches, tokens_of

import sagebwd
from reference import rel
from sagebwd import sla2
from sagebwd.recipe import MATMULS
from sagebwd.sla2.dense import Rows

pytestmark = pytest.mark.cpu_only

EXACT = sagebwd.Recipe(high_precision=tuple(MATMULS))

SHAPES = [(128, 64), (64, 128), (64, 64), (128, 192), (192, 128)]


def tensors(s=700, b=2, h=4, hk=2, d=32):
    """q, k, v and dO; the means of keys are not 0."""
    make = lambda heads: torch.randn(b, s, heads, d)
    return make(h), make(hk) + 2 * torch.randn(1, 1, hk, d), make(hk), make(h)


def module(**options):
    layer = sla2.Attention(4, 32, kv_heads=2, causal=True, **{"keep": 0.3, **options})
    for p in layer.parameters():
        p.data = p.data + 0.5 * torch.randn_like(p)
    return layer


def wanted_lists(layer, q, k):
    """(listed, left to the linear branch): bool [b, h, rows, key blocks], a row at a time."""
    router, s = layer.router, q.shape[1]
    bq, bk = router.block_q, router.block_k
    q, k = (x.double().transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    blocks = math.ceil(s / bk)
    listed = torch.zeros(*q.shape[:2], math.ceil(s / bq), blocks, dtype=torch.bool)
    left = torch.zeros_like(listed)
    for i in range(listed.shape[2]):
        first, last = i * bq, min((i + 1) * bq, s) - 1
        past = [j for j in range(blocks) if min((j + 1) * bk, s) - 1 < first]
        diagonal = [j for j in range(blocks) if j not in past and j * bk <= last]
        listed[:, :, i, diagonal] = True
        if not past:
            continue
        before = q[:, :, first - bq : first].mean(2, keepdim=True) @ layer.router.wq.double()
        keys = torch.stack([k[:, :, j * bk : (j + 1) * bk].mean(2) for j in past], 2)
        scores = (before @ (keys @ layer.router.wk.double()).transpose(-1, -2))[:, :, 0]
        fixed = [j for j in router.always if j in past]
        scores[..., fixed] = math.inf
        entries = min(max(1, round(layer.keep * len(past)), len(fixed)), len(past))
        chosen = scores.topk(entries, -1).indices
        listed[:, :, i] = listed[:, :, i].scatter(-1, chosen, True)
        left[:, :, i, past] = True
        left[:, :, i] = left[:, :, i].scatter(-1, chosen, False)
    return listed, left


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("always", [(), (0, 3, 40)])
def test_what_is_listed(shape, always):
    q, k, _, _ = tensors()
    layer = module(block_q=shape[0], block_k=shape[1], always=always)
    lists, excluded = layer.router.route(q, k, layer.keep)
    listed, left = wanted_lists(layer, q, k)
    assert torch.equal(lists.to_mask(), listed) and torch.equal(~excluded.to_mask(), left)
    # The diagonal comes first, and it and the best block of the past lead.
    i = listed.shape[2] - 1
    first = {j for j in range(listed.shape[3]) if (j + 1) * shape[1] > i * shape[0]}
    assert set(lists.index[0, 0, i, : len(first)].tolist()) == first
    assert lists.lead >= len(first) + 1


@pytest.mark.parametrize("options", [dict(rows=6), dict(alpha="head"), dict(alpha="mass")], ids=str)
@pytest.mark.parametrize("recipe", [EXACT, "vectorwise"], ids=["exact", "int8"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_gradients(options, recipe, shape):
    q, k, v, dout = tensors()
    layer = module(recipe=recipe, block_q=shape[0], block_k=shape[1], **options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    parameter = next(layer.alpha.parameters())
    out = layer(*leaves)
    got = torch.autograd.grad(out, [*leaves, parameter], dout)

    listed, left = wanted_lists(layer, q.detach(), k.detach())
    pairs = lambda mask: tokens_of(mask.double(), *shape, 700, 700)
    earlier = torch.ones(700, 700, dtype=torch.float64).tril()
    twins = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    weight = parameter.detach().double().requires_grad_()
    sparse, lse, linear, n = branches(*twins, pairs(listed) * earlier, pairs(left))
    if "alpha" not in options:
        rows = -(-700 // shape[0])
        at = (torch.arange(rows) + 0.5) * (6 / rows) - 0.5
        at = at.clamp(0, 5)
        low = at.floor().long()
        logit = torch.lerp(weight[:, low], weight[:, (low + 1).clamp(max=5)], at.double() - low)
        alpha = torch.sigmoid(logit).repeat_interleave(shape[0], 1)[None, :, :700]
    elif options["alpha"] == "head":
        alpha = torch.sigmoid(weight)[None]
    else:
        alpha = torch.sigmoid(lse - n.where(n > 0, 1.0).log() - weight[:, None])
    alpha = alpha.expand_as(n).where(n > 0, 1.0)[..., None]
    want = alpha * sparse + (1 - alpha) * linear
    grads = torch.autograd.grad(want, [*twins, weight], dout.double().transpose(1, 2))
    want = [want, *grads[:3]]
    gates = (1e-4,) * 5 if recipe is EXACT else (0.03, 0.03, 0.04, 0.03, 0.04)
    results = zip(("out", "dq", "dk", "dv"), (out, *got), (x.transpose(1, 2) for x in want), gates)
    for name, a, b, gate in results:
        assert rel(a, b) < gate, f"{name}: {rel(a, b):.2e}"
    assert rel(got[3], grads[3]) < gates[4], f"dα: {rel(got[3], grads[3]):.2e}"


@pytest.mark.parametrize("alpha", ["block", "mass"])
@pytest.mark.parametrize("cut", [65, 384, 500])
def test_later_tokens_change_nothing(alpha, cut):
    """Not the output, not the lists, and no gradient reaches them."""
    q, k, v, dout = tensors()
    layer = module(alpha=alpha, recipe=EXACT)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = layer(*leaves)
    grads = torch.autograd.grad(out[:, :cut], leaves, dout[:, :cut])
    assert all((g[:, cut:] == 0).all() for g in grads)
    assert all((g[:, :cut] != 0).any() for g in grads)

    with torch.no_grad():
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[:, cut:] = 3 * torch.randn_like(x[:, cut:]) + 5
        lists, changed = (layer.router.route(*x[:2], layer.keep) for x in ((q, k), other))
        rows = -(-cut // 128)  # the row of the cut has chosen before it
        for a, b in zip(lists, changed):
            assert torch.equal(a.index[:, :, :rows], b.index[:, :, :rows])
            assert torch.equal(a.count, b.count)
        assert not torch.equal(lists[0].index, changed[0].index)
        assert rel(layer(*other)[:, cut:], out[:, cut:]) > 0.5
        for recipe in (EXACT, sagebwd.Recipe()):
            layer.call["recipe"] = recipe
            assert torch.equal(layer(*other)[:, :cut], layer(q, k, v)[:, :cut])


def test_one_block_of_queries_has_no_complement():
    """The first block sees what full attention sees, and has no part in α."""
    q, k, v, dout = tensors()
    layer = module(rows=6, recipe=EXACT)
    full = sagebwd.attention(q, k, v, causal=True, recipe=EXACT)
    out = layer(q, k, v)
    assert rel(out[:, :128], full[:, :128]) < 1e-5 and rel(out[:, 384:], full[:, 384:]) > 0.01
    (grad,) = torch.autograd.grad(out, layer.alpha.logit, dout)
    assert (grad[:, 0] == 0).all() and (grad[:, 2:] != 0).all()


@pytest.mark.parametrize(("keep", "s"), [(1, 700), (0.97, 700), (0.1, 100), (0.8, 250)])
def test_all_blocks_chosen_is_causal_attention(keep, s):
    q, k, v, _ = tensors(s)
    want = sagebwd.attention(q, k, v, causal=True)
    assert torch.equal(module(keep=keep)(q, k, v), want)


def test_decoding_is_refused():
    q, k, v, _ = tensors()
    layer = module()
    for some in (q[:, -1:], q[:, :300]):
        with pytest.raises(NotImplementedError, match="use_cache=False"):
            layer(some, k, v)
    layer.keep = 1
    want = sagebwd.attention(q, k, v, causal=True)
    assert rel(layer(q[:, -1:], k, v), want[:, -1:]) < 0.02


def test_states_tell_causal_from_other_modules():
    state = module().state_dict()
    module().load_state_dict(state)
    with pytest.raises(RuntimeError, match="causal"):
        sla2.Attention(4, 32, kv_heads=2).load_state_dict(state)


@pytest.mark.long
@pytest.mark.parametrize("alpha", ["block", pytest.param("mass", marks=pytest.mark.long)])
def test_compile_and_meta_tensors(alpha):
    q, k, v, dout = tensors()
    layer = module(alpha=alpha, always=(1,))
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(rel(a, b) < 1e-5 for a, b in zip(*results))
    with torch.device("meta"):
        layer, x = sla2.Attention(4, 32, keep=0.3, causal=True), torch.randn(2, 700, 4, 32)
    assert layer(x, x, x).shape == x.shape


class Toy(torch.nn.Module):
    """A layer whose q, k and v are its input."""

    def __init__(self):
        super().__init__()
        self.attend = sla2.Attention(2, 16, keep=0.25, rows=8, causal=True)

    def forward(self, q, k, v):
        return self.attend(q, k, v)


def misleading(b=2, s=1024, heads=2, d=16):
    """Keys of every fourth block vary more than the others, so these blocks have most of a row. The
    first channel tells; a larger one, which means nothing, hides it from the means."""
    blocks = lambda *values: torch.stack(values, -1).repeat_interleave(s // 16, 1)
    some = lambda: torch.randn(b, 16, heads)
    loud = (torch.rand(b, 16, heads).argsort(1) < 4).float()
    q = 0.2 * torch.randn(b, s, heads, d) + torch.randn(b, 1, heads, d)
    k = (0.5 + 2 * blocks(loud)) * torch.randn(b, s, heads, d)
    q[..., :2], k[..., :2] = 1.0, blocks(loud, 2 * some())
    return q, k, torch.randn(b, s, heads, d) + blocks(*(some() for _ in range(d)))


@pytest.mark.long
def test_stage_1_finds_a_better_router():
    model, batches = Toy(), [misleading() for _ in range(6)]
    (layer,) = sla2.fit(model, batches, steps=40)
    assert all(t < 0.95 * i for t, i in zip(layer.trained, layer.identity)), str(layer)
    assert layer.kept == [True, True] and all(0 < s < 0.5 for s in layer.softness)
    # What it reports is what the module gives.
    q, k, v = batches[-1]
    full = sagebwd.attention(q, k, v, causal=True, recipe=EXACT)
    errors = [rel(model(q, k, v)[:, :, h], full[:, :, h]) for h in range(2)]
    assert errors == pytest.approx(layer.error, rel=1e-3)


@pytest.mark.parametrize("alpha", ["block", "mass"])
def test_hard_masks_in_stage_1_are_the_module(alpha):
    q, k, v, _ = tensors()
    layer = module(alpha=alpha, rows=6, recipe=EXACT)
    mask = layer.router.route(q, k, layer.keep)[1].to_mask().float()
    some = torch.tensor([5, 0, 3])
    rows = Rows(q, k, v, some, 128, 64, causal=True)
    shares = lambda lse, norm: (
        layer.alpha(lse, norm) if alpha == "mass" else layer.alpha(6)[None, :, some, None]
    )
    out = rows.out(mask[:, :, some], shares)
    want = layer(q, k, v).transpose(1, 2)
    full = sagebwd.attention(q, k, v, causal=True, recipe=EXACT).transpose(1, 2)
    for i, row in enumerate((slice(640, 700), slice(0, 128), slice(384, 512))):
        assert rel(out[:, :, i, : row.stop - row.start], want[:, :, row]) < 1e-4
        assert rel(rows.full[:, :, i, : row.stop - row.start], full[:, :, row]) < 1e-4
