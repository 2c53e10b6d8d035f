# SPDX-License-Identifier: Apache-2.0
"""Head dims that are no multiple of 8, and values of another size than queries and keys."""

import pytest
import torch
import torch.nn.functional as F

import sagebwd
from reference import check, exact_grads, rel, visible
from sagebwd import kv_cache, padding
from sagebwd.integrations import torch_sdpa

# q and k; v
HEAD_DIMS = [(1, 1), (20, 20), (37, 5), (24, 40), (192, 128), (100, 256), (255, 255), (64, 48)]


def problem(d, dv, s=70, sk=90, h=4, hk=2, dtype=torch.float32):
    """q, k, v as [b, h, s, d] and dout."""
    make = lambda *shape: torch.randn(*shape).to(dtype)
    return make(2, h, s, d), make(2, hk, sk, d), make(2, hk, sk, dv), make(2, h, s, dv)


def compare(function, q, k, v, dout, mask=None):
    """function(q, k, v) of [b, h, s, d] leaves against float64, with gradients."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = function(*leaves)
    want, _, *grads = exact_grads(q, k, v, dout, mask)
    assert out.shape == dout.shape and out.dtype == q.dtype
    check("out", out, want)
    got = torch.autograd.grad(out, leaves, dout)
    for name, a, b, t in zip(("dq", "dk", "dv"), got, grads, leaves):
        assert a.shape == t.shape
        if b.norm() > 1e-9:  # with one key dq and dk are 0
            check(name, a, b, 0.1)  # one channel has one code for all it is


@pytest.mark.parametrize("d,dv", HEAD_DIMS)
def test_attention(d, dv):
    q, k, v, dout = problem(d, dv)
    seen = visible(70, 90, causal=True)
    dense = lambda *t: sagebwd.attention(*t, causal=True, layout="bhsd")
    compare(dense, q, k, v, dout, seen)
    swapped = lambda *t: sagebwd.attention(*(x.transpose(1, 2) for x in t), causal=True).transpose(
        1, 2
    )
    compare(swapped, q, k, v, dout, seen)
    assert sagebwd.is_supported(q, k, v, layout="bhsd")


def test_padding_changes_no_bit_of_a_call_that_needs_none():
    q, k, v, dout = problem(64, 64)
    assert padding.fits(q, v)
    want = sagebwd.attention(q, k, v, layout="bhsd")
    assert torch.equal(padding.forward(q, k, v, sagebwd._ops.attention.Options())[0], want)


def test_the_result_is_as_dense_as_without_padding():
    q, k, v, _ = problem(20, 12)
    out = sagebwd.attention(*(t.transpose(1, 2).contiguous() for t in (q, k, v)))
    assert out.is_contiguous() and out.view(2, 70, 4 * 12).shape == (2, 70, 48)


@pytest.mark.parametrize("d,dv", [(20, 20), (192, 128), (24, 40)])
def test_packed(d, dv):
    q, k, v, dout = problem(d, dv, s=60, sk=60)
    flat = lambda t: t.transpose(1, 2).flatten(0, 1)
    cu = torch.tensor([0, 60, 120], dtype=torch.int32)

    def function(q, k, v):
        out = sagebwd.attention_varlen(flat(q), flat(k), flat(v), cu, cu, 60, 60)
        return out.unflatten(0, (2, 60)).transpose(1, 2)

    compare(function, q, k, v, dout)
    assert sagebwd.is_supported(flat(q), flat(k), flat(v), cu, cu)


def test_gradient_of_lse_and_the_default_scale():
    q, k, v, _ = problem(20, 12)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    _, lse, top = sagebwd.attention(*leaves, layout="bhsd", return_lse=True, return_max_logit=True)
    keys = k.repeat_interleave(2, 1).double()
    logits = q.double() @ keys.mT / 20**0.5
    assert (lse - logits.logsumexp(-1)).abs().max() < 0.05
    assert (top - logits.amax((-1, -2))).abs().max() < 0.1
    (dq,) = torch.autograd.grad(lse.sum(), leaves[:1])
    check("dq", dq, logits.softmax(-1) @ keys / 20**0.5)


def swap(function):
    return lambda *t: function(*(x.transpose(1, 2) for x in t)).transpose(1, 2)


@pytest.mark.parametrize("d,dv", [(20, 20), (48, 32), (24, 40)])
def test_drop_ins(d, dv):
    q, k, v, dout = problem(d, dv, s=60, sk=60)
    bottom = visible(60, 60, causal=True)
    compare(swap(lambda *t: sagebwd.flash_attn_func(*t, causal=True)), q, k, v, dout, bottom)
    compare(lambda *t: sagebwd.sageattn(*t, is_causal=True), q, k, v, dout, bottom)
    sdpa = lambda *t, **options: sagebwd.scaled_dot_product_attention(
        *t, enable_gqa=True, **options
    )
    compare(lambda *t: sdpa(*t, is_causal=True), q, k, v, dout, bottom)
    compare(lambda *t: sdpa(*t, attn_mask=bottom), q, k, v, dout, bottom)
    cu = torch.tensor([0, 60, 120], dtype=torch.int32)

    def varlen(q, k, v):
        flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        out = sagebwd.flash_attn_varlen_func(*flat, cu, cu, 60, 60, causal=True)
        return out.unflatten(0, (2, 60)).transpose(1, 2)

    compare(varlen, q, k, v, dout, bottom)


@pytest.mark.parametrize("ragged", [False, True])
def test_cache(ragged):
    q, k, v, _ = problem(36, 20, s=3, sk=40)
    new_k, new_v = torch.randn(2, 3, 2, 36), torch.randn(2, 3, 2, 20)
    caches = [F.pad(t.transpose(1, 2), (0, 0, 0, 0, 0, 8)).clone() for t in (k, v)]
    lengths = torch.tensor([40, 40], dtype=torch.int32) if ragged else 40
    out = kv_cache.flash_attn_with_kvcache(
        q.transpose(1, 2), *caches, new_k, new_v, cache_seqlens=lengths, causal=True
    )
    k, v = (torch.cat([a, b.transpose(1, 2)], 2) for a, b in ((k, new_k), (v, new_v)))
    want = exact_grads(q, k, v, torch.zeros(2, 4, 3, 20), visible(3, 43, causal=True))[0]
    check("out", out.transpose(1, 2), want)
    assert torch.equal(caches[0][:, 40:43], new_k) and torch.equal(caches[1][:, 40:43], new_v)


@pytest.mark.parametrize("d,dv", [(20, 20), (48, 32), (24, 40)])
def test_pytorchs_attention(d, dv):
    q, k, v, dout = problem(d, dv, s=60, sk=60, h=2)
    with torch_sdpa.enabled():
        compare(F.scaled_dot_product_attention, q, k, v, dout)


@pytest.mark.cpu_only
def test_graphs_compiled_elsewhere_are_padded_by_the_kernel():
    q, k, v, dout = problem(20, 20, s=60, sk=60, h=2)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with torch_sdpa.enabled() as seen:
        compare(lambda *t: operator(*t)[0], q, k, v, dout)
    assert seen.calls == 1


@pytest.mark.parametrize("d,dv", [(20, 20), (48, 32)])
def test_compiled(d, dv):
    q, k, v, dout = problem(d, dv, s=60, sk=60)
    compiled = torch.compile(
        lambda q, k, v: sagebwd.attention(q, k, v, layout="bhsd", causal=True),
        fullgraph=True,
        backend="aot_eager",
    )
    compare(compiled, q, k, v, dout, visible(60, 60, causal=True))


def test_meta_and_autocast():
    q, k, v, _ = (t.to("meta") for t in problem(20, 12))
    assert sagebwd.attention(q, k, v, layout="bhsd").shape == (2, 4, 70, 12)
    assert sagebwd.is_supported(q, k, v, layout="bhsd")
    q, k, v, _ = problem(20, 12)
    with torch.autocast(q.device.type, torch.bfloat16):
        out = sagebwd.attention(q, k, v, layout="bhsd")
    assert out.dtype == torch.bfloat16
    check("out", out, exact_grads(q, k, v, torch.zeros_like(out))[0])


def test_channels_that_are_not_next_to_each_other():
    q, k, v, dout = problem(20, 12, s=60, sk=60)
    turned = [t.mT.contiguous().mT for t in (q, k, v)]
    a, b = (sagebwd.attention(*t, layout="bhsd") for t in ((q, k, v), turned))
    assert rel(a, b) < 1e-6


@pytest.mark.parametrize("d,dv", [(257, 257), (264, 8), (64, 257), (0, 8)])
def test_head_dims_out_of_range_are_refused(d, dv):
    q, k, v, _ = problem(d, dv, s=4, sk=4)
    with pytest.raises(NotImplementedError, match="head dim.*expected 1 to 256.*more heads"):
        sagebwd.attention(q, k, v, layout="bhsd")
    assert "expected 1 to 256" in sagebwd.is_supported(q, k, v, layout="bhsd").reason


def test_q_and_k_need_one_head_dim():
    q, k, v, _ = problem(20, 20, s=4, sk=4)
    with pytest.raises(ValueError, match="one for q and k"):
        sagebwd.attention(q, F.pad(k, (0, 4)), v, layout="bhsd")
