# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: how lists are made, and attention over them with PyTorch's machinery."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import sagebwd
from reference import grads_of, qkv
from sagebwd import BlockLists
from sagebwd._ops import attention as ops

pytestmark = pytest.mark.cpu_only

INF = math.inf


def _lists(b=2, h=4, rows=3, key_blocks=5, seed=0, **options):
    scores = torch.randn(b, h, rows, key_blocks, generator=torch.Generator().manual_seed(seed))
    return BlockLists.top_k(scores, **{"k": 2, **options})


def _pairs(lists, s, sk):
    """[b, h, s, sk]: what each query sees of each key."""
    mask = lists.to_mask()
    mask = mask.repeat_interleave(lists.block_q, 2).repeat_interleave(lists.block_k, 3)
    return mask[:, :, :s, :sk]


def _exact(q, k, v, seen):
    """Attention in the dtype of q, heads before tokens; rows that see nothing give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    logits = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -INF)
    p = torch.where(seen.any(-1, keepdim=True), logits, 0.0).softmax(-1)
    return p.masked_fill(~seen, 0.0) @ v


def _error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


# --- lists ----------------------------------------------------------------------------------------


def test_top_k_lists_the_best_first():
    scores = torch.tensor([[0.1, 3.0, -INF, 2.0, 5.0], [1.0, -INF, -INF, -INF, -INF]])
    lists = BlockLists.top_k(scores, k=3, always=(0,))
    assert lists.index.shape == (1, 1, 2, 3) and lists.index.dtype == torch.int32
    # Block 0 is listed whatever its score, in its place.
    assert lists.index[0, 0, 0].tolist() == [4, 1, 0] and lists.count[0, 0].tolist() == [3, 1]
    assert lists.index[0, 0, 1, 0] == 0
    assert lists.sparsity() == pytest.approx(1 - 4 / 10)
    # Blocks of `always` that have no score of their own come last.
    assert BlockLists.top_k(scores, k=2, always=(2,)).index[0, 0, 0].tolist() == [4, 2]
    # keep is a share, rounded.
    assert BlockLists.top_k(torch.randn(1, 1, 1, 19), keep=0.1).index.shape[-1] == 2
    # No two scores are closer than float32 can tell: bfloat16 would tie them.
    close = torch.tensor([[1.0, 1.0 + 2**-20]])
    assert BlockLists.top_k(close, k=1).index.item() == 1


def test_masks_and_lists_are_the_same_thing():
    mask = torch.rand(2, 3, 4, 7) < 0.3
    mask[0, 0, 1] = False
    lists = BlockLists.from_mask(mask, block_q=64)
    assert torch.equal(lists.to_mask(), mask)
    assert lists.index.shape[-1] == mask.sum(-1).max()
    assert lists.sparsity() == pytest.approx(1 - mask.double().mean().item())
    turned = lists.transposed()
    assert torch.equal(turned.to_mask(), mask.transpose(-1, -2))
    assert (turned.block_q, turned.block_k, turned.key_blocks) == (64, 64, 4)
    top = _lists()
    assert torch.equal(BlockLists.from_mask(top.to_mask()).to_mask(), top.to_mask())
    # Batch and heads may be left out.
    assert torch.equal(BlockLists.from_mask(mask[0, 0]).to_mask(), mask[:1, :1])


def test_csr():
    offset, index = torch.tensor([0, 2, 2, 5]), torch.tensor([4, 1, 0, 3, 2])
    lists = BlockLists.from_csr(offset, index, key_blocks=5)
    assert lists.count.flatten().tolist() == [2, 0, 3]
    assert lists.index[0, 0, 0, :2].tolist() == [4, 1]
    assert lists.index[0, 0, 2].tolist() == [0, 3, 2]
    per_head = BlockLists.from_csr(torch.stack([offset, offset * 0]), index, key_blocks=5)
    assert per_head.count.tolist() == [[[2, 0, 3], [0, 0, 0]]]
    none = BlockLists.from_csr(torch.zeros(4, dtype=torch.int64), index[:0], key_blocks=5)
    assert none.sparsity() == 1 and none.index.shape == (1, 1, 3, 0)
    q = torch.randn(1, 300, 2, 64)
    assert (sagebwd.attention(q, q, q, blocks=none) == 0).all()
    for bad in ([0, 3, 2, 5], [0, 2, 2, 6], [-1, 0, 1, 2]):
        with pytest.raises(ValueError, match="do not fall"):
            BlockLists.from_csr(torch.tensor(bad), index, key_blocks=5)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: BlockLists.top_k(torch.randn(2, 10), keep=0.05), ValueError, "at least one of 10"),
        (lambda: BlockLists.top_k(torch.randn(2, 10), keep=1.5), ValueError, "up to 1"),
        (lambda: BlockLists.top_k(torch.randn(2, 10), keep=0.5, k=5), TypeError, "one of them"),
        (lambda: BlockLists.top_k(torch.randn(2, 10)), TypeError, "one of them"),
        (lambda: BlockLists.top_k(torch.randn(2, 10), k=11), ValueError, "0 to 10"),
        (lambda: BlockLists.top_k(torch.randn(2, 10), k=1, always=(0, 3)), ValueError, "at most"),
        (lambda: BlockLists.top_k(torch.randn(2, 10), k=1, always=(10,)), ValueError, "0 to 9"),
        (lambda: BlockLists.top_k(torch.tensor([[1.0, math.nan]]), k=1), ValueError, "NaN"),
        (lambda: BlockLists.top_k(torch.ones(2, 10).int(), k=1), TypeError, "floating-point"),
        (lambda: BlockLists.top_k(torch.randn(10), k=1), ValueError, "dimensions"),
        (lambda: BlockLists.from_mask(torch.ones(2, 10)), TypeError, "bool"),
        (lambda: BlockLists(torch.zeros(2, 1), key_blocks=4), TypeError, "int32"),
        (lambda: _lists(block_q=96), ValueError, "multiple of 64"),
        (lambda: _lists(block_k=32), ValueError, "multiple of 64"),
        (lambda: _lists(lead=-2), ValueError, "-1"),
        (
            lambda: BlockLists(torch.zeros(2, 1).int(), torch.zeros(3).int(), key_blocks=4),
            ValueError,
            "count",
        ),
    ],
)
def test_refused_lists(make, error, words):
    with pytest.raises(error, match=words):
        make()


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_lists(causal, shared, dtype):
    q, k, v, dout = (t.to(dtype) for t in qkv(b=2, s=300, sk=310, h=4, hk=2, d=64))
    lists = _lists(1, 1) if shared else _lists(2, 4)
    seen = _pairs(lists, 300, 310)
    if causal:
        seen = seen & torch.ones(300, 310, dtype=torch.bool).tril(10)
    call = lambda q, k, v: sagebwd.attention(q, k, v, blocks=lists, causal=causal, layout="bhsd")
    got = grads_of(call, q, k, v, dout)
    wide = [t.double() for t in (q, k, v, dout)]
    exact = lambda q, k, v: _exact(q, k, v, seen)
    want = grads_of(exact, *wide)
    for name, g, w, limit in zip(("out", "dq", "dk", "dv"), got, want, (0.03, 0.035, 0.04, 0.03)):
        assert _error(g, w) < limit, name
    nothing = ~seen.any(-1).expand(2, 4, 300)
    assert (got[0][nothing] == 0).all()


def test_without_int8_it_is_exact():
    """Every matmul in floating point: what is left is float32."""
    q, k, v, dout = qkv(b=2, s=200, sk=310, h=4, hk=2, d=64)
    lists = _lists(rows=2)
    recipe = sagebwd.Recipe(high_precision=("S", "O", "S'", "dV", "dP", "dQ", "dK"))
    call = lambda *t: sagebwd.attention(*t, blocks=lists, recipe=recipe, layout="bhsd")
    exact = lambda *t: _exact(*t, _pairs(lists, 200, 310))
    got = grads_of(call, q, k, v, dout)
    want = grads_of(exact, *(t.double() for t in (q, k, v, dout)))
    for name, g, w in zip(("out", "dq", "dk", "dv"), got, want):
        assert _error(g, w) < 1e-5, name


def test_lists_of_all_blocks_are_dense_attention():
    q, k, v, dout = qkv(b=1, s=300, sk=500, h=2, d=64)
    lists = BlockLists.from_mask(torch.ones(3, 4, dtype=torch.bool), block_k=128, lead=0)
    for causal in (False, True):
        dense = lambda *t: sagebwd.attention(*t, causal=causal, layout="bhsd")
        sparse = lambda *t: sagebwd.attention(*t, causal=causal, blocks=lists, layout="bhsd")
        for a, b in zip(grads_of(sparse, q, k, v, dout), grads_of(dense, q, k, v, dout)):
            assert torch.equal(a, b)


def test_packed_documents_equal_separate_calls():
    lengths, lengths_k = (130, 0, 70, 300), (200, 64, 10, 300)
    q, dout = torch.randn(510, 4, 64), torch.randn(510, 4, 64)  # 10 behind the last document
    k, v = torch.randn(574, 2, 64), torch.randn(574, 2, 64)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths, lengths_k))
    each = []
    for n, m in zip(lengths, lengths_k):
        rows, blocks = -(-n // 128), -(-m // 64)
        each.append(_lists(1, 4, rows, blocks, seed=n, k=min(2, blocks)))
    pad = lambda t: torch.nn.functional.pad(t, (0, 2 - t.shape[-1]), value=-1)
    packed = BlockLists(
        torch.cat([pad(one.index) for one in each], 2),
        torch.cat([one.count for one in each], 2),
        key_blocks=5,
    )
    call = lambda q, k, v: sagebwd.attention_varlen(q, k, v, cu_q, cu_k, blocks=packed)
    whole = grads_of(call, q, k, v, dout)
    assert (whole[0][500:] == 0).all() and (whole[1][500:] == 0).all()
    for t, lists in enumerate(each):
        a, b = slice(cu_q[t], cu_q[t + 1]), slice(cu_k[t], cu_k[t + 1])
        if lengths[t] == 0:
            continue
        one = lambda q, k, v: sagebwd.attention(q[None], k[None], v[None], blocks=lists)[0]
        alone = grads_of(one, q[a], k[b], v[b], dout[a])
        for together, part, where in zip(whole, alone, (a, a, b, b)):
            assert torch.equal(together[where], part)


def test_lse_and_its_gradient():
    q, k, v, _ = (t.double() for t in qkv(b=1, s=130, sk=200, h=2, d=64))
    lists = _lists(1, 2, 2, 4)
    seen = _pairs(lists, 130, 200)
    q.requires_grad_()
    want = (q @ k.mT / 8).masked_fill(~seen, -INF).logsumexp(-1)
    (dq,) = torch.autograd.grad(want.sin().sum(), q)
    leaf = q.detach().float().requires_grad_()
    _, lse = sagebwd.attention(
        leaf, k.float(), v.float(), blocks=lists, layout="bhsd", return_lse=True
    )
    (got,) = torch.autograd.grad(lse.sin().sum(), leaf)
    assert _error(lse, want) < 1e-3 and _error(got, dq) < 0.03


@pytest.mark.slow
def test_compile_checkpoint_and_autocast():
    torch._dynamo.reset()
    q, k, v, dout = qkv(b=2, s=300, sk=310, h=4, hk=2, d=64)

    def layer(q, k, v):
        with torch.no_grad():  # a router: block means, scores, lists
            pool = lambda t, n: torch.nn.functional.avg_pool1d(
                t.flatten(0, 1).mT, n, ceil_mode=True
            ).mT.unflatten(0, t.shape[:2])
            scores = pool(q, 128) @ pool(k.repeat_interleave(2, 1), 64).mT
        lists = BlockLists.top_k(scores, keep=0.4, always=(0,))
        return sagebwd.attention(q, k, v, blocks=lists, layout="bhsd")

    want = grads_of(layer, q, k, v, dout)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    checkpointed = lambda *t: checkpoint(layer, *t, use_reentrant=False)
    for function in (compiled, checkpointed):
        for a, b in zip(grads_of(function, q, k, v, dout), want):
            assert torch.equal(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(q, k, v).dtype == torch.bfloat16


@pytest.mark.parametrize("count", [False, True])
def test_opcheck(count):
    q, k, v, dout = qkv(b=2, s=140, sk=150, h=4, hk=2, d=64)
    lists = _lists(2, 4, 2, 3)
    options = ops.Options(list_index=lists.index, list_count=lists.count if count else None)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    fwd, bwd = torch.ops.sagebwd.fwd.default, torch.ops.sagebwd.bwd.default
    torch.library.opcheck(fwd, (*leaves, *options, False, False, False))
    out, lse, _, codes = fwd(q, k, v, *options, False, False, True)
    for given in (None, codes):
        torch.library.opcheck(bwd, (dout, q, k, v, out, lse, None, *options, False, False, given))


def test_operations_count_listed_blocks():
    q, k, v, _ = qkv(b=2, s=256, sk=320, h=4, hk=2, d=64)
    lists = _lists(1, 4, 2, 5)
    for blocks, pairs in ((None, 2 * 4 * 256 * 320), (lists, 2 * 4 * 2 * 2 * 128 * 64)):
        with FlopCounterMode(display=False) as counter:
            sagebwd.attention(q, k, v, blocks=blocks, layout="bhsd")
        assert counter.get_total_flops() == 2 * 2 * 64 * pairs


def test_diagnose_does_not_compare_sparse_calls_with_dense_ones():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return sagebwd.attention(x, x, x, blocks=_lists(1, 1, 1, 2, k=1)).sum()

    x = torch.randn(1, 128, 2, 64, requires_grad=True)
    report = sagebwd.diagnose(Layer(), x, loss=lambda out: out)
    assert "block lists" in str(report)


def _call(spoil):
    q = torch.randn(2, 300, 4, 64)
    k = torch.randn(2, 310, 2, 64)
    return lambda: sagebwd.attention(q, k, k, **spoil())


def _entries(index, count=None, **options):
    index = torch.tensor(index, dtype=torch.int32).expand(3, -1)
    count = None if count is None else torch.full((3,), count, dtype=torch.int32)
    return BlockLists(index, count, **{"key_blocks": 5, **options})


@pytest.mark.parametrize(
    "spoil, error, words",
    [
        (lambda: {"blocks": _entries([5])}, ValueError, "from 0 to 4, got 5"),
        (lambda: {"blocks": _entries([-1])}, ValueError, "from 0 to 4, got -1"),
        (lambda: {"blocks": _entries([1, 2, 1])}, ValueError, "once, got 1 again"),
        (lambda: {"blocks": _entries([1, 2], 3)}, ValueError, r"width \(2\), got 3"),
        (lambda: {"blocks": _entries([1], key_blocks=4)}, ValueError, "5 key_blocks"),
        (lambda: {"blocks": _lists(rows=2)}, ValueError, "3 rows"),
        (lambda: {"blocks": _lists(b=3)}, ValueError, "1 or 2 batch"),
        (lambda: {"blocks": _lists(h=2)}, ValueError, "1 or 4 heads"),
        (lambda: {"blocks": torch.zeros(3, 1).int()}, TypeError, "BlockLists"),
        (lambda: {"blocks": _lists().to("meta")}, ValueError, r"blocks.to\(q.device\)"),
        (
            lambda: {"blocks": _lists(), "recipe": sagebwd.Recipe(tile_k=128)},
            ValueError,
            "recipe.tile_k",
        ),
    ],
)
def test_refused_calls(spoil, error, words):
    with pytest.raises(error, match=words):
        _call(spoil)()


def test_is_supported_knows_lists():
    q = torch.randn(1, 300, 2, 64)
    lists = _lists(1, 2, 3, 5)
    assert sagebwd.is_supported(q, q, q, blocks=lists)
    support = sagebwd.is_supported(q, q, q, blocks=_lists(1, 2, 2, 5))
    assert not support and "3 rows" in support.reason
