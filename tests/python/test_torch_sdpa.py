# SPDX-License-Identifier: Apache-2.0
"""The adapter behind F.scaled_dot_product_attention: routing, refusals, fallback, restoring,
compile."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import sagebwd
from reference import check, exact_grads, grads_of, qkv, rel, visible
from sagebwd.integrations import torch_sdpa


@pytest.fixture(autouse=True)
def _restore():
    yield
    torch_sdpa.restore()
    torch._dynamo.reset()


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sdpa_runs_here(layout, dtype):
    q, k, v, dout = qkv(b=2, s=90, dtype=dtype)
    if q.is_cuda and dtype == torch.float32:
        pytest.skip("PyTorch's flash attention takes 16 bits on a GPU")
    if layout == "bshd":
        q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, dout))
    want = grads_of(
        lambda *t: sagebwd.scaled_dot_product_attention(*t, is_causal=True), q, k, v, dout
    )
    with torch_sdpa.enabled():
        got = grads_of(lambda *t: sdpa(*t, is_causal=True), q, k, v, dout)
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    plain = grads_of(lambda *t: sdpa(*t, is_causal=True), q, k, v, dout)
    assert not torch.equal(plain[0], got[0]), "restored: PyTorch's own kernel"
    for a, b in zip(got, plain):
        assert 0 < rel(a, b) < 0.06


@pytest.mark.cpu_only  # float32
def test_scale_gqa_and_unequal_lengths():
    q, k, v, dout = qkv(h=4, hk=2, s=40, sk=90)
    want = exact_grads(q, k, v, dout, scale=0.2)
    with (
        torch_sdpa.enabled(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    ):
        got = grads_of(lambda *t: sdpa(*t, scale=0.2, enable_gqa=True), q, k, v, dout)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
        check(name, a, b)
    assert not torch.equal(got[0], sdpa(q, k, v, scale=0.2, enable_gqa=True))


@pytest.mark.cpu_only  # float32
def test_settings():
    q, k, v, dout = qkv(s=200)
    results = []
    for options in (dict(), dict(recipe="paper"), dict(backward="bf16")):
        with torch_sdpa.enabled(**options):
            results.append(grads_of(sdpa, q, k, v, dout))
        want = grads_of(lambda *t: sagebwd.attention(*t, layout="bhsd", **options), q, k, v, dout)
        for a, b in zip(results[-1], want):
            assert torch.equal(a, b)
    assert not torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[2][1])
    with pytest.raises(ValueError, match="backward"):
        torch_sdpa.activate(backward="fp8")
    with pytest.raises(ValueError, match="devices"):
        torch_sdpa.activate(devices=("xpu",))


@pytest.mark.cpu_only  # float32
def test_25_unsupported_calls_raise_and_nothing_stays_behind():
    q, k, v, dout = qkv(s=40)
    mask = torch.randn(40, 40)
    before = sdpa(q, k, v)
    with torch_sdpa.enabled():
        with pytest.raises(NotImplementedError, match="attn_mask"):
            sdpa(q, k, v, attn_mask=mask)
        with pytest.raises(NotImplementedError, match="float64"):
            sdpa(q.double(), k.double(), v.double())
    assert torch.equal(sdpa(q, k, v), before)
    with pytest.raises(KeyError):
        with torch_sdpa.enabled():
            raise KeyError
    assert torch.equal(sdpa(q, k, v), before)


@pytest.mark.cpu_only  # float32
def test_29_fallback_does_not_come_back_here():
    q, k, v, dout = qkv(s=40)
    mask = torch.randn(40, 40)
    want = grads_of(lambda *t: sdpa(*t, attn_mask=mask), q, k, v, dout)
    plain = sdpa(q, k, v)
    with torch_sdpa.enabled(fallback=True):
        with pytest.warns(UserWarning, match="attn_mask of shape .* is not supported"):
            got = grads_of(lambda *t: sdpa(*t, attn_mask=mask), q, k, v, dout)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once per reason
            sdpa(q, k, v, attn_mask=mask)
        ours = sdpa(q, k, v)
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    assert torch.equal(ours, sagebwd.scaled_dot_product_attention(q, k, v))
    assert torch.equal(sdpa(q, k, v), plain)
    assert torch.equal(sdpa(q, k, v, attn_mask=mask), want[0])


def test_activation_emits_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_sdpa.activate()
        torch_sdpa.restore()


def test_compile_through_sdpa():
    on_gpu = torch.get_default_device().type == "cuda"  # where flash attention is one of 16 bits
    q, k, v, dout = qkv(s=80, dtype=torch.bfloat16 if on_gpu else torch.float32)

    def layer(q, k, v):
        return F.scaled_dot_product_attention(q * 1.5, k, v, is_causal=True) + 1

    with torch_sdpa.enabled():
        want = grads_of(layer, q, k, v, dout)
        got = grads_of(
            torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager"), q, k, v, dout
        )
    for a, b in zip(got, want):  # on a GPU dQ is added up in any order
        assert torch.allclose(a, b, atol=0.02, rtol=0.02) if on_gpu else torch.equal(a, b)


def test_registry():
    assert torch.nn.attention.current_flash_attention_impl() is None
    torch_sdpa.register()
    assert "sagebwd" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("sagebwd")
    assert torch.nn.attention.current_flash_attention_impl() == "sagebwd"
    during = torch._C._dispatch_dump("aten::_flash_attention_forward")
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    after = torch._C._dispatch_dump("aten::_flash_attention_forward")
    cuda = lambda dump: [line for line in dump.split("\n") if line.startswith("CUDA")]
    assert len(cuda(during)) == len(cuda(after)) + 1, (during, after)


def test_cuda_kernels_on_cpu_tensors():
    """The CUDA operators' functions are Python: the same code computes on any device."""
    q, k, v, dout = qkv(h=4, hk=2, s=70)
    want = exact_grads(q, k, v, dout, visible(70, 70, True))
    out, lse, cq, ck, mq, mk, seed, offset, _ = torch_sdpa._kernels.sdpa_forward(q, k, v, 0.0, True)
    assert (cq, ck, mq, mk) == (None, None, 70, 70) and out.stride() == q.stride()
    grads = torch_sdpa._kernels.sdpa_backward(
        dout, q, k, v, out, lse, cq, ck, mq, mk, 0.0, True, seed, offset
    )
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *grads), (want[0], *want[2:])):
        check(name, a, b)

    turned = [t.transpose(1, 2) for t in (q, k, v)]
    flash = dict(window_size_left=20, window_size_right=0)
    out, lse, rng, unused, _ = torch_sdpa._kernels.flash_forward(
        *turned, None, None, 70, 70, 0.0, False, False, **flash
    )
    want = exact_grads(q, k, v, dout, visible(70, 70, False, (20, 0)))
    grads = torch_sdpa._kernels.flash_backward(
        dout.transpose(1, 2),
        *turned,
        out,
        lse,
        None,
        None,
        70,
        70,
        0.0,
        False,
        rng,
        unused,
        **flash,
    )
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *grads), (want[0], *want[2:])):
        check(name, a.transpose(1, 2), b)

    cu = torch.tensor([0, 30, 70], dtype=torch.int32)
    packed = [t[0].transpose(0, 1) for t in (q, k, v, dout)]
    out, lse, rng, unused, _ = torch_sdpa._kernels.flash_forward(
        *packed[:3], cu, cu, 40, 40, 0.0, True, False
    )
    assert lse.shape == (4, 70)
    grads = torch_sdpa._kernels.flash_backward(
        packed[3], *packed[:3], out, lse, cu, cu, 40, 40, 0.0, True, rng, unused
    )
    want = grads_of(lambda *t: sagebwd.attention_varlen(*t, cu, cu, causal=True), *packed)
    for a, b in zip((out, *grads), want):
        assert torch.equal(a, b)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        torch_sdpa._kernels.flash_forward(
            *packed[:3], cu, cu, 40, 40, 0.0, True, False, alibi_slopes=torch.ones(4)
        )
