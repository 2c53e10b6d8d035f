# SPDX-License-Identifier: Apache-2.0
"""Values of another head dim than queries and keys go to the kernels as they are: results, what is
kept, shapes without data, refusals. test_padding.py has the fronts, and what is padded."""

import pytest
import torch

import sagebwd
from reference import check, exact_grads, visible
from sagebwd import padding
from sagebwd._ops import attention as ops

DIMS = [(192, 128), (64, 48), (24, 40), (8, 256)]  # q and k; v


def problem(d, dv, b=2, s=70, sk=140, h=4, hk=2, dtype=torch.float32):
    """q, k, v as [b, h, s, d] and dout."""
    make = lambda *shape: torch.randn(*shape).to(dtype)
    return make(b, h, s, d), make(b, hk, sk, d), make(b, hk, sk, dv), make(b, h, s, dv)


def gradients(call, q, k, v, dout, dlse=None):
    """(out, lse, dq, dk, dv) of call(q, k, v), which gives out and lse."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out, lse = call(*leaves)
    wanted = (out,) if dlse is None else (out, lse)
    return out, lse, *torch.autograd.grad(wanted, leaves, (dout, dlse)[: len(wanted)])


def dense(*tensors, **options):
    return sagebwd.attention(*tensors, layout="bhsd", return_lse=True, **options)


@pytest.mark.cpu_only
@pytest.mark.parametrize("d,dv", DIMS)
def test_nothing_is_padded_on_a_cpu(d, dv, monkeypatch):
    def refuse(*_):
        raise AssertionError("padded")

    monkeypatch.setattr(padding, "_wide", refuse)
    q, k, v, dout = problem(d, dv)
    assert padding.fits(q, v)
    out, *_ = gradients(lambda *t: dense(*t, causal=True), q, k, v, dout)
    want = exact_grads(q, k, v, dout, visible(70, 140, causal=True))[0]
    check("out", out, want)


@pytest.mark.parametrize("save_codes", [True, False])
@pytest.mark.parametrize("recipe", ["vectorwise", "paper"])
@pytest.mark.parametrize("d,dv", DIMS)
def test_gradients(d, dv, recipe, save_codes):
    q, k, v, dout = problem(d, dv)
    dlse = torch.randn(2, 4, 70)
    recipe = sagebwd.Recipe.parse(recipe, save_codes=save_codes)
    seen = visible(70, 140, causal=True)
    got = gradients(lambda *t: dense(*t, causal=True, recipe=recipe), q, k, v, dout)
    out, _, *grads = exact_grads(q, k, v, dout, seen)
    for name, a, b in zip(("out", "dq", "dk", "dv"), (got[0], *got[2:]), (out, *grads)):
        check(name, a, b, 0.1)
    # The gradient of lse as well, against that of a padded call.
    wide = max(d, dv)
    pad = lambda t, n: torch.nn.functional.pad(t, (0, n - t.shape[-1]))
    call = lambda *t: dense(*t, causal=True, recipe=recipe, softmax_scale=d**-0.5)
    got = gradients(call, q, k, v, dout, dlse)
    want = gradients(call, *(pad(t, wide) for t in (q, k, v, dout)), dlse)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want):
        gate = 1e-3 if d == wide else 0.1  # q and k of more channels are rotated otherwise
        check(name, a, b[..., : a.shape[-1]] if name != "lse" else b, gate)


def _by_python(monkeypatch):
    monkeypatch.setattr(ops, "_attend", None)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("save_codes", [True, False])
@pytest.mark.parametrize("d,dv", DIMS)
def test_every_way_gives_the_same_bits(d, dv, save_codes, layout, monkeypatch):
    """Autograd in C++, in Python, and that of compiled code; strides too."""
    q, k, v, dout = (
        t.transpose(1, 2).contiguous().transpose(1, 2) if layout == "bshd" else t
        for t in problem(d, dv)
    )
    recipe = sagebwd.Recipe(save_codes=save_codes)
    call = lambda *t: dense(*t, causal=True, recipe=recipe, deterministic=True)
    want = gradients(call, q, k, v, dout)
    runs = [gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), q, k, v, dout)]
    _by_python(monkeypatch)
    runs.append(gradients(call, q, k, v, dout))
    for run in runs:
        for a, b in zip(run, want):
            assert torch.equal(a, b) and a.stride() == b.stride()
    assert want[0].shape == dout.shape


def test_compiled_for_any_length():
    call = lambda *t: sagebwd.attention(*t, causal=True, deterministic=True)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (70, 150):
        leaves = [torch.randn(2, n, h, d) for h, d in ((4, 48), (2, 48), (2, 24))]
        leaves = [t.requires_grad_() for t in leaves]
        a, b = compiled(*leaves), call(*leaves)
        assert torch.equal(a, b) and a.stride() == b.stride()
        for x, y in zip(*(torch.autograd.grad(t.square().sum(), leaves) for t in (a, b))):
            assert torch.equal(x, y)


def test_meta_tensors_have_the_strides_of_real_ones():
    for packed in (False, True):

        def run(device):
            shape = (70,) if packed else (2, 70)
            sizes = ((4, 48), (2, 48), (2, 24))
            leaves = [
                torch.randn(*shape, *s, dtype=torch.bfloat16, device=device, requires_grad=True)
                for s in sizes
            ]
            cu = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
            call = sagebwd.attention_varlen if packed else sagebwd.attention
            results = call(*leaves, *((cu, cu, 40, 40) if packed else ()), return_lse=True)
            loss = results[0].float().sum() + results[1].sum()
            return (*results, *torch.autograd.grad(loss, leaves))

        for a, b in zip(run("meta"), run(None), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.parametrize("swapped", [False, True])
def test_opcheck(swapped):
    q, k, v, dout = problem(24, 40)
    if swapped:
        q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, dout))
    options = ops.Options(causal=True)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    fwd, bwd = torch.ops.sagebwd.fwd.default, torch.ops.sagebwd.bwd.default
    torch.library.opcheck(fwd, (*leaves, *options, False, False, False))
    out, lse, _, codes = fwd(q, k, v, *options, False, False, True)
    for given in (None, codes):
        torch.library.opcheck(bwd, (dout, q, k, v, out, lse, None, *options, False, False, given))


# --- memory ---------------------------------------------------------------------------------------


def kept_bytes(d, dv):
    """Bytes that autograd keeps for the backward beside out and lse."""
    shape = (2, 1024, 4)
    q, k, v = (torch.randn(*shape, n, requires_grad=True) for n in (d, d, dv))
    kept = {}
    pack = lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, lse = sagebwd.attention(q, k, v, return_lse=True)
    mine = {t.untyped_storage().data_ptr() for t in (out, lse)}
    rest = [t for at, t in kept.items() if at not in mine]
    assert all(t.dtype == torch.uint8 for t in rest)
    return sum(t.numel() for t in rest)


@pytest.mark.cpu_only
def test_kept_bytes_do_not_grow_by_padding_of_v():
    # 64 channels of four heads, of 2 * 1024 tokens and of a centre for every 128 of them.
    fewer = 4 * (2048 + 16) * 64
    assert kept_bytes(192, 192) - kept_bytes(192, 128) == fewer
    # A byte per channel; 12 per token and head, and centres of blocks.
    assert kept_bytes(192, 128) <= 4 * 2048 * (2 * 192 + 128 + 12 + 3)


@pytest.mark.cpu_only
@pytest.mark.parametrize("d,dv", DIMS)
def test_size_of_codes_from_shapes(d, dv):
    q, k, v, dout = problem(d, dv, b=3, s=67, sk=139)
    options = ops.Options()
    out, lse, _, codes = torch.ops.sagebwd.fwd(q, k, v, *options, False, False, True)
    assert codes.shape == (ops.codes_bytes(q, k, v, None),)
    call = lambda c: ops.backward(dout, q, k, v, out, lse, None, options, codes=c)
    want = ops.backward(dout, q, k, v, out, lse, None, options)
    assert all(torch.equal(a, b) for a, b in zip(call(codes), want))
    with pytest.raises(ValueError, match=f"codes: expected at least {codes.numel()} bytes"):
        call(codes[:-16].clone())


# --- where padding pays ---------------------------------------------------------------------------


def test_head_dims_that_tuned_kernels_get():
    for given, tuned, want in [
        ((64, 48), 128, (64, 64)),
        ((96, 64), 128, (96, 96)),
        ((48, 100), 128, (104, 104)),
        ((64, 64), 128, (64, 64)),
        ((192, 128), 128, (192, 128)),  # no tuned kernel has 192
        ((128, 136), 128, (128, 136)),
        ((20, 20), 128, (24, 24)),
        ((64, 48), 0, (64, 48)),
        ((37, 5), 0, (40, 8)),
        ((64, 0), 0, (64, 8)),
    ]:
        assert padding.head_dims(*given, tuned) == want


def test_calls_on_a_gpu_are_padded_where_it_pays(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setitem(ops._TUNED, torch.bfloat16, 128)
    seen = []
    call = ops.forward
    monkeypatch.setattr(
        ops, "forward", lambda q, k, v, *a, **b: seen.append((q, v)) or call(q, k, v, *a, **b)
    )
    for d, dv, dtype, want in [
        (64, 48, torch.bfloat16, (64, 64)),
        (192, 128, torch.bfloat16, (192, 128)),
        (64, 48, torch.float32, (64, 48)),
    ]:
        with FakeTensorMode():
            q, v = (torch.empty(2, 70, 4, n, device="cuda", dtype=dtype) for n in (d, dv))
            assert sagebwd.attention(q, q, v).shape == (2, 70, 4, dv)
        assert tuple(t.shape[-1] for t in seen[-1]) == want


def test_the_library_says_which_those_are():
    largest = torch.ops.sagebwd.tuned_head_dim
    cuda = "CUDA" in torch.ops.sagebwd.build()
    assert largest("bf16") == largest("f16") == (128 if cuda else 0)
    assert largest("f32") == 0
    with pytest.raises(RuntimeError, match="expected f32, bf16 or f16"):
        largest("f64")
    assert ops.tuned_head_dim(torch.empty(1, dtype=torch.bfloat16, device="cpu")) == 0


# --- operations and refusals ----------------------------------------------------------------------


@pytest.mark.cpu_only
def test_operations_count_v_by_its_own_head_dim():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v, dout = problem(48, 24)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    pairs = 2 * 4 * 70 * 140
    with FlopCounterMode(display=False) as counter:
        out = sagebwd.attention(*leaves, layout="bhsd")
        assert counter.get_total_flops() == 2 * pairs * (48 + 24)
        out.backward(dout)
        assert counter.get_total_flops() == 2 * pairs * (48 + 24 + 3 * 48 + 2 * 24)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, dout = problem(24, 40)
    for wrong, words in [
        ((q, k, v[:, :, 1:]), "k, v: expected one shape but for the head dim"),
        ((q, k, v[:, :1]), "k, v: expected one shape but for the head dim"),
        ((q, k[..., :16], v), "one for q and k"),
    ]:
        with pytest.raises(ValueError, match=words):
            sagebwd.attention(*wrong, layout="bhsd")
    for wrong in (v[..., :0], torch.cat([v] * 7, -1)):
        with pytest.raises(NotImplementedError, match="head dim of v: expected 1 to 256"):
            sagebwd.attention(q, k, wrong, layout="bhsd")
    options = ops.Options()
    out, lse, *_ = torch.ops.sagebwd.fwd(q, k, v, *options, False, False, False)
    # By their names, and by those of the library.
    for name, core, tensors in [
        ("out", "o", (dout, q, k, v, q)),
        ("dout", "dout", (q, q, k, v, out)),
    ]:
        with pytest.raises(ValueError, match=rf"{core}: expected shape \[2, 4, 70, 40\]"):
            ops.backward(*tensors, lse, None, options)
        meta = [t.to("meta") for t in (*tensors, lse)]
        with pytest.raises(ValueError, match=rf"{name}: expected.*head dim of v, \(2, 4, 70, 40"):
            ops.backward(*meta, None, options)
    with pytest.raises(RuntimeError, match="head dim of v: expected a multiple of 8 from 8 to 256"):
        torch.ops.sagebwd.fwd(q, k, v[..., :12], *options, False, False, False)


def test_the_linear_branch_has_one_head_dim():
    q, k, v, _ = problem(24, 40, sk=70, hk=4)
    with pytest.raises(NotImplementedError, match="head dim of v: expected that of q"):
        sagebwd.linear_attention(q, k, v, layout="bhsd")
    with pytest.raises((RuntimeError, ValueError), match="v: expected|head dim of v"):
        torch.ops.sagebwd.linear_fwd(q, k, v, None, None, 128, 64, True)
