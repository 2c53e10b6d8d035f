# SPDX-License-Identifier: Apache-2.0
"""The linear branch against its definition in float64, with every pair of tokens written out."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sagebwd import BlockLists, linear_attention
from sagebwd._ops import linear, matmuls

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _exact(q, k, v, lists=None, mean_free_keys=True):
    """(out, norm) in float64, heads before tokens; differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    if mean_free_keys:
        k = k - k.mean(2, keepdim=True)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = q.softmax(-1) @ k.softmax(-1).transpose(-1, -2)
    if lists is not None:
        excluded = lists.to_mask().repeat_interleave(lists.block_q, 2)[:, :, : q.shape[2]]
        weights = weights * ~excluded.repeat_interleave(lists.block_k, 3)[..., : k.shape[2]]
    norm = weights.sum(-1)
    return weights @ v / norm.where(norm > 0, 1.0)[..., None], norm


def _error(got, want):
    want = want.detach().double()
    return ((got.detach().double() - want).norm() / want.norm().clamp(min=1e-300)).item()


def _same(got, want):
    """Bits on a CPU. On a GPU other strides may take another matmul."""
    if got.is_cuda:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got, want)


def _tensors(b, h, hk, n, nk, d, dtype=torch.float32, grad=True):
    shapes = ((b, h, n, d), (b, hk, nk, d), (b, hk, nk, d))
    return tuple(torch.randn(s).to(dtype).requires_grad_(grad) for s in shapes)


def _lists(q, k, share, block_q=128, block_k=64, shared=False):
    rows, columns = -(-q.shape[2] // block_q), -(-k.shape[2] // block_k)
    shape = (1, 1) if shared else q.shape[:2]
    order = torch.rand(*shape, rows, columns).argsort(-1)
    mask = order < round(share * columns)
    return BlockLists.from_mask(mask, block_q=block_q, block_k=block_k)


def _clustered(n, nk, d, dtype, sparsity):
    """Queries look for the keys of their own cluster, and lists have the blocks of that cluster:
    what is left has little of the whole."""
    rows, columns, clusters = -(-n // 128), -(-nk // 64), 8
    centre = 4 * torch.randn(2, clusters, d)
    own = centre[:, torch.arange(n) * clusters // n]
    keys_own = centre[:, torch.arange(nk) * clusters // nk]
    q = torch.randn(1, 2, n, d) + own
    k = torch.randn(1, 2, nk, d) + keys_own
    near = -(torch.arange(rows)[:, None] / rows - torch.arange(columns) / columns).abs()
    scores = near + 1e-3 * torch.rand(1, 2, rows, columns)
    lists = BlockLists.top_k(scores, k=round((1 - sparsity) * columns))
    return q.to(dtype), k.to(dtype), torch.randn(1, 2, nk, d).to(dtype), lists


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.97])
def test_clustered_queries(dtype, sparsity):
    """Both ways to the sum: total minus chosen (CPU kernels) and a product with a 0/1 matrix."""
    q, k, v, lists = _clustered(1024, 2048, 64, dtype, sparsity)
    out, norm = linear_attention(q, k, v, exclude=lists, layout="bhsd", return_norm=True)
    args = (lists.index, lists.count, lists.block_q, lists.block_k, True)
    product, product_norm = matmuls.forward(q, k, v, *args)
    assert out.dtype == dtype and out.shape == q.shape
    assert norm.dtype == torch.float32 and norm.shape == q.shape[:3]
    if sparsity == 0:  # every block is excluded
        assert not out.any() and not norm.any() and not product.any() and not product_norm.any()
        return
    want, want_norm = _exact(q, k, v, lists)
    limit = 1e-5 if dtype == torch.float32 else 3e-3
    assert _error(out, want) <= limit and _error(product, want) <= limit
    assert _error(norm, want_norm) <= 1e-5 and _error(product_norm, want_norm) <= 1e-5
    # Where both round to the same 16 bits, they differ by how often the last one flips. The kernels
    # of a GPU have sums over blocks in 16 bits.
    assert _error(out, product) <= (limit if out.is_cuda else 1e-3)


SHAPES = [
    # b, h, hk, n, nk, d, block_q, block_k, share
    (1, 2, 2, 256, 512, 64, 128, 64, 0.25),
    (2, 4, 2, 300, 700, 32, 64, 128, 0.5),
    (1, 6, 1, 130, 321, 24, 128, 64, 0.8),
    (2, 2, 2, 70, 40, 8, 64, 64, 0.0),
]


@pytest.mark.parametrize("mean_free_keys", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, mean_free_keys):
    *sizes, block_q, block_k, share = shape
    q, k, v = leaves = _tensors(*sizes)
    lists = _lists(q, k, share, block_q, block_k)
    options = dict(exclude=lists, layout="bhsd", mean_free_keys=mean_free_keys)
    got = linear_attention(q, k, v, return_norm=True, **options)
    want = _exact(q, k, v, lists, mean_free_keys)
    # Norms are about nk / d, so a small gradient of theirs weighs as much as that of out.
    dout, dnorm = torch.randn(q.shape), 0.02 * torch.randn(q.shape[:3])
    for parts in ((0,), (1,), (0, 1)):
        given = [(dout, dnorm)[i] for i in parts]
        grads = torch.autograd.grad([got[i] for i in parts], leaves, given, retain_graph=True)
        exact = torch.autograd.grad(
            [want[i] for i in parts],
            leaves,
            [g.double() for g in given],
            retain_graph=True,
            allow_unused=True,  # v has no part in the norm
        )
        args = (lists.index, lists.count, block_q, block_k, mean_free_keys)
        no_dout = torch.zeros_like(dout)
        plain = matmuls.backward(
            dout if 0 in parts else no_dout, dnorm if 1 in parts else None, q, k, v, *args
        )
        for name, a, b, c in zip("qkv", grads, exact, plain):
            if b is None:
                assert not a.any() and not c.any()
                continue
            assert _error(a, b) <= 1e-5, f"d{name} of {parts}"
            assert _error(c, b) <= 1e-5, f"d{name} of {parts}, product"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_16_bit_gradients(dtype):
    q, k, v = leaves = _tensors(1, 2, 1, 256, 512, 64, dtype)
    lists = _lists(q, k, 0.1)
    dout = torch.randn(q.shape).to(dtype)
    out = linear_attention(q, k, v, exclude=lists, layout="bhsd")
    grads = torch.autograd.grad(out, leaves, dout)
    want = torch.autograd.grad(_exact(q, k, v, lists)[0], leaves, dout.double())
    # The kernels of a GPU round the matrices of blocks to BF16, and dK twice.
    gate = 4.5e-3 if grads[0].is_cuda and dtype == torch.bfloat16 else 3e-3
    for a, b in zip(grads, want):
        assert a.dtype == dtype and _error(a, b) <= gate


def test_layouts_and_shared_lists():
    q, k, v = _tensors(2, 4, 2, 200, 300, 32)
    lists = _lists(q, k, 0.4, shared=True)
    out, norm = linear_attention(q, k, v, exclude=lists, layout="bhsd", return_norm=True)
    turned = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    out2, norm2 = linear_attention(*turned, exclude=lists, return_norm=True)
    _same(out2.transpose(1, 2), out)
    _same(norm2, norm)
    wide = [torch.stack((t, t), -1)[..., 0] for t in (q, k, v)]  # channels apart
    _same(linear_attention(*wide, exclude=lists, layout="bhsd"), out)
    each = BlockLists.from_mask(lists.to_mask().expand(2, 4, -1, -1))
    _same(linear_attention(q, k, v, exclude=each, layout="bhsd"), out)


@pytest.mark.parametrize("n, nk", [(1, 1), (63, 65), (64, 64), (65, 127), (129, 130)])
def test_lengths_around_blocks(n, nk):
    """What lies behind the last token has no part in anything."""
    dout = torch.randn(1, 2, n, 16)
    results = []
    q, k, v = _tensors(1, 2, 1, n, nk, 16, grad=False)
    lists = _lists(q, k, 0.5, 64, 64)
    for behind in (0, 100):
        leaves = []
        for t in (q, k, v):
            memory = torch.full((*t.shape[:2], t.shape[2] + behind, 16), float("nan"))
            memory[:, :, : t.shape[2]] = t
            leaves.append(memory[:, :, : t.shape[2]].requires_grad_())
        out, norm = linear_attention(*leaves, exclude=lists, layout="bhsd", return_norm=True)
        results.append((out, norm, *torch.autograd.grad(out, leaves, dout)))
    for a, b in zip(*results):
        _same(a, b)
    want = _exact(q, k, v, lists)
    torch.testing.assert_close(results[0][0].double(), want[0], rtol=1e-5, atol=1e-5)


def test_nothing_left():
    """A block of queries that excludes every key gives zeros, and so do its gradients."""
    q, k, v = leaves = _tensors(1, 1, 1, 256, 256, 16)
    mask = torch.zeros(1, 1, 2, 4, dtype=torch.bool)
    mask[:, :, 0] = True
    lists = BlockLists.from_mask(mask)
    out, norm = linear_attention(q, k, v, exclude=lists, layout="bhsd", return_norm=True)
    assert not out[:, :, :128].any() and not norm[:, :, :128].any() and norm[:, :, 128:].all()
    grads = torch.autograd.grad((out, norm), leaves, (torch.randn(q.shape), torch.randn(1, 1, 256)))
    assert not grads[0][:, :, :128].any() and all(g.isfinite().all() for g in grads)
    assert _error(out, _exact(q, k, v, lists)[0]) <= 1e-5


def test_no_lists_exclude_nothing():
    q, k, v = _tensors(1, 2, 1, 150, 200, 16)
    out = linear_attention(q, k, v, layout="bhsd")
    _same(out, linear_attention(q, k, v, exclude=_lists(q, k, 0), layout="bhsd"))
    assert _error(out, _exact(q, k, v)[0]) <= 1e-6


def test_causal_by_lists():
    """What the refusal of causal=True says: exclude what is not past, and keep K as it is."""
    q, k, v = _tensors(1, 1, 1, 512, 512, 16, grad=False)
    rows, columns = torch.arange(4)[:, None] * 128, torch.arange(8) * 64
    lists = BlockLists.from_mask(columns + 64 > rows)
    out = linear_attention(q, k, v, exclude=lists, layout="bhsd", mean_free_keys=False)
    for t in (q, k, v):
        t[:, :, 384:] += 1.0
    again = linear_attention(q, k, v, exclude=lists, layout="bhsd", mean_free_keys=False)
    _same(out[:, :, :384], again[:, :, :384])
    assert not torch.equal(out[:, :, 384:], again[:, :, 384:])
    assert not out[:, :, :128].any()


# --- 16 bits: on a GPU these have kernels ---------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("mean_free_keys", [True, False])
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_in_16_bits(d, mean_free_keys, dtype):
    q, k, v = leaves = _tensors(2, 4, 2, 300, 500, d, dtype)
    lists = _lists(q, k, 0.4)
    out, norm = linear_attention(
        q, k, v, exclude=lists, layout="bhsd", return_norm=True, mean_free_keys=mean_free_keys
    )
    want = _exact(q, k, v, lists, mean_free_keys)
    assert _error(out, want[0]) <= 3e-3 and _error(norm, want[1]) <= 1e-5
    given = torch.randn(q.shape).to(dtype), 0.02 * torch.randn(q.shape[:3])
    grads = torch.autograd.grad((out, norm), leaves, given)
    exact = torch.autograd.grad(want, leaves, [g.double() for g in given])
    for name, a, b in zip("qkv", grads, exact):
        assert a.dtype == dtype and _error(a, b) <= 4e-3, name


def test_large_means_in_16_bits():
    """What differs between tokens is small beside the means of v and of the gradient."""
    q, k, v = _tensors(1, 2, 2, 1024, 1024, 64, torch.bfloat16, grad=False)
    leaves = q.requires_grad_(), k.requires_grad_(), (v + 4).requires_grad_()
    dout = torch.randn(q.shape).add(4).bfloat16()
    lists = _lists(q, k, 0.1)
    grads = torch.autograd.grad(
        linear_attention(*leaves, exclude=lists, layout="bhsd"), leaves, dout
    )
    exact = torch.autograd.grad(_exact(*leaves, lists)[0], leaves, dout.double())
    for name, a, b in zip("qkv", grads, exact):
        assert _error(a, b) <= 5e-3, name


def test_compiled_and_under_autocast_in_16_bits():
    leaves = _tensors(1, 2, 1, 200, 300, 64)
    lists = _lists(*leaves[:2], 0.4)

    def loss(q, k, v):
        with torch.autocast(q.device.type, dtype=torch.bfloat16):
            out, norm = linear_attention(q, k, v, exclude=lists, layout="bhsd", return_norm=True)
        assert out.dtype == torch.bfloat16
        return out.float().square().sum() + norm.log().sum()

    want = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), want):
        assert torch.equal(a, b)


def test_captured_into_a_graph():
    """A replay takes what is in the tensors and the lists at that time. Nothing waits."""
    q, k, v = _tensors(1, 2, 1, 300, 400, 64, torch.bfloat16, grad=False)
    if not q.is_cuda:
        pytest.skip("needs a GPU")
    options = (128, 64, True)
    first, second = (_lists(q, k, 0.5) for _ in range(2))
    index, count = first.index.clone(), first.count.clone()
    dout = torch.randn(q.shape).bfloat16()
    fwd, bwd = torch.ops.sagebwd.linear_fwd, torch.ops.sagebwd.linear_bwd
    call = lambda i, c: (
        *fwd(q, k, v, i, c, *options),
        *bwd(dout, None, q, k, v, i, c, *options),
    )
    call(index, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(index, count)
    index.copy_(second.index), count.copy_(second.count)
    q.copy_(torch.randn(q.shape))
    graph.replay()
    for a, b in zip(results, call(second.index, second.count)):
        assert torch.equal(a, b)


# --- the way of PyTorch's matmuls -----------------------------------------------------------------


def test_heads_in_chunks(monkeypatch):
    q, k, v = _tensors(2, 6, 3, 200, 300, 16, grad=False)
    lists = _lists(q, k, 0.3)
    args = (q, k, v, lists.index, lists.count, 128, 64, True)
    dout, dnorm = torch.randn(q.shape), torch.randn(q.shape[:3])
    whole = (*matmuls.forward(*args), *matmuls.backward(dout, dnorm, *args))
    monkeypatch.setattr(matmuls, "_MOST_SUMS", 1)
    parts = (*matmuls.forward(*args), *matmuls.backward(dout, dnorm, *args))
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_unchecked_entries_are_ignored():
    """On a GPU nobody checks lists: entries out of range exclude nothing."""
    q, k, v = _tensors(1, 1, 1, 128, 300, 16, grad=False)
    index = torch.tensor([[[[3, -1, 7, 3, 2**31 - 1, 1]]]], dtype=torch.int32)
    count = torch.tensor([[[5]]], dtype=torch.int32)
    lists = BlockLists(torch.tensor([[3]], dtype=torch.int32), key_blocks=5)
    got = matmuls.forward(q, k, v, index, count, 128, 64, True)
    want = matmuls.forward(q, k, v, lists.index, None, 128, 64, True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.fixture
def no_kernel(monkeypatch):
    """As on a GPU for tensors that no kernel serves."""
    monkeypatch.setattr(linear, "has_kernel", lambda q: False)
    monkeypatch.setattr(linear, "_announced", set())
    monkeypatch.setenv("SAGEBWD_IMPL", "")
    reasons = "\n  cuda-sm80: has the linear branch in bf16 and f16, not f32"
    call, asked = linear.call, torch.ops.sagebwd.linear_refusal.default
    monkeypatch.setattr(
        linear, "call", lambda op, *args: reasons if op == asked else call(op, *args)
    )


def test_matmuls_say_once_that_they_serve_a_call(no_kernel):
    q, k, v = leaves = _tensors(1, 2, 1, 130, 200, 16)
    lists = _lists(q, k, 0.5)
    with pytest.warns(UserWarning, match="matmuls make .* head dim 16.*\n.*bf16 and f16, not f32"):
        got, norm = linear_attention(q, k, v, exclude=lists, layout="bhsd", return_norm=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_attention(q, k, v, exclude=lists, layout="bhsd")
        grads = torch.autograd.grad(got.square().sum() + norm.log().sum(), leaves)
    want, want_norm = _exact(q, k, v, lists)
    assert _error(got, want) <= 1e-5
    exact = torch.autograd.grad(want.square().sum() + want_norm.log().sum(), leaves)
    for a, b in zip(grads, exact):
        assert _error(a, b) <= 1e-5


def test_matmuls_take_no_call_of_a_pinned_implementation(no_kernel, monkeypatch):
    q, k, v = _tensors(1, 2, 1, 130, 200, 16)
    monkeypatch.setenv("SAGEBWD_IMPL", "cuda-sm90")
    with pytest.raises(NotImplementedError, match="SAGEBWD_IMPL pins cuda-sm90.*\n.*cuda-sm80"):
        linear_attention(q, k, v, layout="bhsd")


def test_a_pinned_implementation_without_a_linear_branch_refuses(monkeypatch):
    q, k, v = _tensors(1, 2, 1, 130, 200, 16)
    assert linear.has_kernel(q) or q.is_cuda
    monkeypatch.setenv("SAGEBWD_IMPL", "nobody")
    with pytest.raises(NotImplementedError, match="SAGEBWD_IMPL pins nobody"):
        linear_attention(q, k, v, layout="bhsd")


# --- PyTorch's machinery --------------------------------------------------------------------------


@pytest.mark.parametrize("with_lists", [True, False])
def test_opcheck(with_lists):
    leaves = _tensors(1, 2, 1, 130, 100, 16)
    lists = _lists(*leaves[:2], 0.5) if with_lists else None
    options = (lists.index, lists.count, 128, 64, True) if lists else (None, None, 128, 64, False)
    matmuls = torch.ops.sagebwd.linear_matmuls_fwd, torch.ops.sagebwd.linear_matmuls_bwd
    tensors = [t.detach() for t in leaves]
    dout, dnorm = torch.randn(leaves[0].shape), torch.randn(leaves[0].shape[:3])
    for fwd, bwd in (linear.operators(leaves[0]), [op.default for op in matmuls]):
        torch.library.opcheck(fwd, (*leaves, *options))
        for given in (dnorm, None):
            torch.library.opcheck(bwd, (dout, given, *tensors, *options))


def test_compile_checkpoint_and_meta():
    q, k, v = leaves = _tensors(1, 2, 1, 130, 200, 16)
    lists = _lists(q, k, 0.5)

    def loss(q, k, v):
        out, norm = linear_attention(q, k, v, exclude=lists, layout="bhsd", return_norm=True)
        return out.square().sum() + norm.log().sum()

    want = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for call in (compiled, lambda *x: checkpoint(loss, *x, use_reentrant=False)):
        for a, b in zip(torch.autograd.grad(call(*leaves), leaves), want):
            _same(a, b)
    meta = [t.detach().to("meta") for t in leaves]
    out, norm = linear_attention(*meta, exclude=lists.to("meta"), layout="bhsd", return_norm=True)
    assert out.shape == q.shape and norm.shape == q.shape[:3] and out.device.type == "meta"


def test_autocast():
    q, k, v = _tensors(1, 2, 2, 128, 128, 16)
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        out = linear_attention(q, k, v, layout="bhsd")
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_operation_counts():
    q, k, v = _tensors(2, 4, 2, 128, 256, 16)
    products = 2 * 16 * 16 * 2 * (4 * 128 + 2 * 256)
    with FlopCounterMode(display=False) as counter:
        out = linear.operators(q)[0](q, k, v, None, None, 128, 64, True)[0]
    assert counter.get_total_flops() == products
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 3 * products


# --- what is refused ------------------------------------------------------------------------------


def _refused(kind, words, call):
    with pytest.raises(kind, match=words):
        call()


def test_bad_input():
    q, k, v = _tensors(1, 2, 1, 256, 256, 16)
    lists = _lists(q, k, 0.5)
    twice = lambda t, dim=0: torch.cat((t, t), dim)
    for kind, words, options in (
        (ValueError, "feature_map: expected 'softmax', got 'elu'", {"feature_map": "elu"}),
        (NotImplementedError, "causal: .*`exclude`", {"causal": True}),
        (TypeError, "exclude: expected sagebwd.BlockLists", {"exclude": lists.index}),
        (TypeError, "return_norm", {"return_norm": "yes"}),
        (TypeError, "mean_free_keys", {"mean_free_keys": 2}),
        (ValueError, "layout", {"layout": "sbhd"}),
        (ValueError, "exclude: expected 1 rows", {"q": q[:, :, :100]}),
        (ValueError, "exclude: expected 2 key_blocks", {"k": k[:, :, :99], "v": v[:, :, :99]}),
        (ValueError, "exclude: .*1 or 1 batch", {"exclude": _lists(twice(q), k, 0.5)}),
        (ValueError, "heads", {"q": q[:, :1], "k": twice(k, 1), "v": twice(v, 1)}),
        (ValueError, "batch size", {"q": twice(q)}),
        (ValueError, "dtype", {"k": k.bfloat16()}),
        (NotImplementedError, "float64", {"q": q.double()}),
        (NotImplementedError, "head dim", {"q": q[..., :12], "k": k[..., :12], "v": v[..., :12]}),
        (ValueError, "expected 4 dimensions", {"q": q[0]}),
    ):
        given = {"q": q, "k": k, "v": v, "exclude": lists, "layout": "bhsd", **options}
        _refused(kind, words, lambda: linear_attention(**given))


@pytest.mark.cpu_only
def test_bad_lists():
    q, k, v = _tensors(1, 1, 1, 128, 256, 16)
    for words, index, count in (
        ("index: expected key blocks from 0 to 3, got 4", [4], None),
        ("index: expected key blocks from 0 to 3, got -1", [-1], None),
        ("index: expected each key block once", [1, 1], None),
        ("count: expected 0 to width", [0, 1], [3]),
    ):
        whole = lambda x: None if x is None else torch.tensor([[x]], dtype=torch.int32)
        lists = BlockLists(whole([index])[0], whole(count), key_blocks=4)
        call = lambda: linear_attention(q, k, v, exclude=lists, layout="bhsd")
        _refused(ValueError, "excluded." + words, call)


def test_transforms_and_second_gradients():
    q, k, v = _tensors(1, 1, 1, 64, 64, 16)
    call = lambda q: linear_attention(q, k, v, layout="bhsd").sum()
    _refused(NotImplementedError, "torch.func", lambda: torch.func.grad(call)(q))
    (dq,) = torch.autograd.grad(call(q), (q,), create_graph=True)
    _refused(NotImplementedError, "double backward", lambda: dq.sum().backward())


def test_products_stay_float32_under_autocast():
    q, k, v = (torch.randn(1, 2, 192, 64) for _ in range(3))
    args = (q, k, v, None, None, 128, 64, True)
    plain = matmuls.forward(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = matmuls.forward(*args)
        grads = matmuls.backward(torch.ones_like(q), None, *args)
    assert all(torch.equal(a, b) for a, b in zip(under, plain))
    assert all(
        torch.equal(a, b) for a, b in zip(grads, matmuls.backward(torch.ones_like(q), None, *args))
    )
