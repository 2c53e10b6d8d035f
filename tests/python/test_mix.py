# SPDX-License-Identifier: Apache-2.0
"""The operators around the branches of sparse-linear attention, against float64: mixing, means of
blocks, the largest scores. SAGEBWD_TEST_DEVICE=cuda runs them on a GPU."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from reference import rel
from sagebwd import BlockLists
from sagebwd._ops import mix

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Errors of a result that is rounded once.
GATE = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}


def contiguous(b, h, n, d):
    return torch.randn(b, h, n, d)


def tokens_first(b, h, n, d):
    return torch.randn(b, n, h, d).transpose(1, 2)


def sliced(b, h, n, d):
    """Rows that start at odd addresses, with gaps between them."""
    return torch.randn(b, n, h, d + 3)[..., 1 : d + 1].transpose(1, 2)


def case(layout=tokens_first, b=2, h=3, n=200, d=72, dtype=torch.float32, block=128, batches=1):
    """sparse, linear, α, norm with zeros, dO. The two branches have different layouts."""
    sparse, linear, dout = (
        make(b, h, n, d).to(dtype) for make in (layout, contiguous, tokens_first)
    )
    if layout is sliced:  # .to() closes the gaps
        gap = torch.empty(b, n, h, d + 3, dtype=dtype)[..., 1 : d + 1].transpose(1, 2)
        sparse = gap.copy_(sparse)
    alpha = torch.rand(batches, h, -(-n // block))
    norm = torch.rand(b, h, n) + 0.5
    norm[:, :, 30:40] = 0
    norm[0, 1, -1] = 0
    return sparse, linear, alpha, norm, dout


def expected(sparse, linear, alpha, norm, dout, block):
    """(out, dsparse, dlinear, dα) in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (sparse, linear, alpha)]
    share = leaves[2].repeat_interleave(block, 2)[..., : sparse.shape[2]]
    share = share.expand(norm.shape).where(norm != 0, 1.0)[..., None]
    out = share * leaves[0] + (1 - share) * leaves[1]
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


def got(sparse, linear, alpha, norm, dout, block):
    leaves = [x.detach().requires_grad_() for x in (sparse, linear, alpha)]
    out = mix.mix(*leaves, norm, block)
    return out, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [contiguous, tokens_first, sliced])
def test_mixing(dtype, layout):
    args = (*case(layout, dtype=dtype), 128)
    names = ("out", "dsparse", "dlinear", "dα")
    for name, a, b in zip(names, got(*args), expected(*args)):
        gate = GATE[dtype] if name != "dα" else 1e-5
        assert rel(a, b) < gate, f"{name}: {rel(a, b):.1e}"


@pytest.mark.parametrize("d", [8, 64, 96, 128, 256])
@pytest.mark.parametrize(("block", "batches"), [(1, 1), (1, 2), (64, 2), (128, 1), (1024, 1)])
def test_forms_of_alpha(d, block, batches):
    """One for each query, for blocks of them, for a head; shared by the batch or not."""
    args = (*case(d=d, n=321, block=block, batches=batches, dtype=torch.bfloat16), block)
    for a, b in zip(got(*args), expected(*args)):
        assert a.shape == b.shape and rel(a, b) < 2e-3


def test_nothing_left_for_the_linear_branch():
    """There linear does not count, whatever it holds, and bits of sparse stay as they are."""
    sparse, linear, alpha, norm, dout = case()
    linear = linear.where(norm[..., None] != 0, torch.nan)
    out, dsparse, dlinear, dalpha = got(sparse, linear, alpha, norm, dout, 128)
    nothing = (norm == 0)[..., None].expand_as(sparse)
    assert torch.equal(out[nothing], sparse[nothing])
    assert torch.equal(dsparse[nothing], dout[nothing]) and (dlinear[nothing] == 0).all()
    assert dalpha.isfinite().all()
    # A norm that is NaN is not 0: what is wrong shows.
    norm[0, 0, 0] = torch.nan
    linear[0, 0, 0] = torch.nan
    assert mix.mix(sparse, linear, alpha, norm, 128)[0, 0, 0].isnan().all()


def test_small_remainders_keep_their_digits():
    """1 - α comes from the float32 α."""
    sparse, linear, alpha, norm, dout = case(dtype=torch.bfloat16)
    args = (sparse, linear, 1 - 1e-4 * alpha, norm, dout, 128)
    assert rel(got(*args)[2], expected(*args)[2]) < 3e-3


def test_results_have_the_layout_of_their_tensors():
    sparse, linear, alpha, norm, dout = case()
    out, dsparse, dlinear, _ = got(sparse, linear, alpha, norm, dout, 128)
    assert out.stride() == dsparse.stride() == sparse.stride()
    assert dlinear.stride() == linear.stride() != sparse.stride()


def test_without_a_norm_and_without_a_gradient_of_alpha():
    sparse, linear, alpha, norm, dout = case()
    leaves = [x.detach().requires_grad_() for x in (sparse, linear)]
    out = mix.mix(*leaves, alpha, None, 128)
    want = expected(sparse, linear, alpha, torch.ones_like(norm), dout, 128)
    for a, b in zip((out, *torch.autograd.grad(out, leaves, dout)), want):
        assert rel(a, b) < 1e-6
    # An expanded gradient, as of out.sum().
    (a,) = torch.autograd.grad(mix.mix(*leaves, alpha, None, 128).sum(), leaves[:1])
    b = expected(sparse, linear, alpha, torch.ones_like(norm), torch.ones_like(dout), 128)[1]
    assert rel(a, b) < 1e-6


def test_gradients_have_the_same_bits_each_time():
    args = (*case(n=1000, block=1024, dtype=torch.bfloat16), 1024)
    first = got(*args)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, got(*args)))


@pytest.mark.parametrize("shape", [(0, 3, 64, 8), (2, 3, 0, 8)])
def test_empty_tensors(shape):
    b, h, n, d = shape
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    alpha = torch.rand(1, h, -(-n // 64), requires_grad=True)
    out = mix.mix(*leaves, alpha, torch.ones(b, h, n), 64)
    grads = torch.autograd.grad(out.sum(), [*leaves, alpha])
    assert out.shape == shape and (grads[2] == 0).all()
    means = mix.block_means(out, out, 64, 64, True)
    assert [m.shape for m in means] == [(b, h, -(-n // 64), d)] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(alpha=torch.rand(1, 3, 3)), "alpha"),
        (dict(alpha=torch.rand(1, 3, 2).double()), "alpha"),
        (dict(alpha=torch.rand(3, 2)), "alpha"),
        (dict(norm=torch.rand(2, 3, 199)), "norm"),
        (dict(linear=torch.randn(2, 3, 200, 64)), "linear"),
        (dict(linear=torch.randn(2, 3, 200, 72).bfloat16()), "linear"),
        (dict(block=100, alpha=torch.rand(1, 3, 2)), "block"),
    ],
)
def test_mixing_refuses(change, words):
    sparse, linear, alpha, norm, _ = case()
    args = dict(sparse=sparse, linear=linear, alpha=alpha, norm=norm, block=128)
    device = sparse.device
    change = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    with pytest.raises(ValueError, match=words):
        mix.mix(**(args | change))


# --- PyTorch's machinery --------------------------------------------------------------------------


def test_opcheck():
    sparse, linear, alpha, norm, dout = case(n=70, block=64)
    leaves = [x.requires_grad_() for x in (sparse, linear, alpha)]
    torch.library.opcheck(torch.ops.sagebwd.mix_fwd.default, (*leaves, norm, 64))
    plain = [x.detach() for x in leaves]
    for with_dalpha in (False, True):
        torch.library.opcheck(
            torch.ops.sagebwd.mix_bwd.default, (dout, *plain, norm, 64, with_dalpha)
        )
    torch.library.opcheck(
        torch.ops.sagebwd.block_means.default, (sparse.detach(), linear.detach(), 64, 64, True)
    )
    torch.library.opcheck(torch.ops.sagebwd.top_k.default, (torch.randn(1, 2, 3, 9), 4))


def test_compile_and_checkpointing():
    sparse, linear, alpha, norm, dout = case(dtype=torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in (sparse, linear, alpha)]
    call = lambda *args: mix.mix(*args, norm, 128) * 2
    results = []
    for function in (
        call,
        torch.compile(call, backend="aot_eager", fullgraph=True),
        lambda *args: checkpoint(call, *args, use_reentrant=False),
    ):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_meta_tensors():
    args = [x.to("meta") for x in case()[:4]]
    out = mix.mix(*args, 128)
    assert out.device.type == "meta" and out.stride() == args[0].stride()
    with pytest.raises(ValueError, match="alpha"):
        mix.mix(*args, 64)


def test_no_double_backward():
    sparse, linear, alpha, norm, _ = case()
    sparse.requires_grad_()
    (grad,) = torch.autograd.grad(
        mix.mix(sparse, linear, alpha, norm, 128).square().sum(), sparse, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()


# --- means of blocks ------------------------------------------------------------------------------


def means_of(x, block, mean_free):
    x = x.double()
    if mean_free:
        x = x - x.mean(2, keepdim=True)
    return torch.stack([part.mean(2) for part in x.split(block, 2)], 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [contiguous, tokens_first, sliced])
@pytest.mark.parametrize("mean_free", [False, True])
def test_means_of_blocks(dtype, layout, mean_free):
    """Fewer key heads than heads, short last blocks."""
    q = case(layout, h=4, n=300, dtype=dtype)[0]
    k = case(layout, h=2, n=450, dtype=dtype)[0] + 3
    got = mix.block_means(q, k, 128, 64, mean_free)
    for a, b in zip(got, (means_of(q, 128, False), means_of(k, 64, mean_free))):
        assert a.dtype == torch.float32 and a.is_contiguous() and rel(a, b) < 2e-6


@pytest.mark.parametrize("d", [8, 64, 256])
@pytest.mark.parametrize("block", [64, 192, 1024])
def test_sizes_of_blocks(d, block):
    q = torch.randn(1, 2, 513, d)
    got = mix.block_means(q, q, block, 64, True)
    for a, b in zip(got, (means_of(q, block, False), means_of(q, 64, True))):
        assert rel(a, b) < 2e-6


def test_means_refuse():
    q = torch.randn(1, 2, 64, 8)
    with pytest.raises(ValueError, match="block_k"):
        mix.block_means(q, q, 64, 100, True)
    with pytest.raises(ValueError, match="head dim"):
        mix.block_means(q, torch.randn(1, 2, 64, 16), 64, 64, True)


# --- the largest scores ---------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 2, 3, 100, 512, 2000])
def test_the_largest_scores(columns):
    scores = torch.randn(2, 3, 5, columns)
    for k in sorted({0, 1, columns // 3, columns}):
        index, count = mix.top_k(scores, k)
        assert index.dtype == torch.int32 and (count == k).all()
        assert torch.equal(scores.gather(-1, index.long()), scores.topk(k, -1).values)


def test_ties_and_infinities():
    """Equal scores come in order, -0 equals 0, and -inf is not listed."""
    inf = torch.inf
    scores = torch.tensor([[1.0, -inf, 0.0, inf, -0.0, 1.0, -inf]])[None, None]
    index, count = mix.top_k(scores, 6)
    assert index.flatten().tolist() == [3, 0, 5, 2, 4, 1] and count.flatten().tolist() == [5]
    lists = BlockLists.top_k(scores.bfloat16(), k=6)
    assert torch.equal(lists.index, index) and torch.equal(lists.count, count)


def test_more_blocks_than_fit():
    scores = torch.randn(1, 1, 2, mix.MOST_COLUMNS + 1)
    lists = BlockLists.top_k(scores, k=7)
    assert torch.equal(scores.gather(-1, lists.index.long()), scores.topk(7, -1).values)
