# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: a logit per head that joins every softmax and has no value."""

import math

import pytest
import torch

import sagebwd
from reference import LSE, check, visible
from sagebwd import kv_cache


def exact(q, k, v, sinks, mask):
    """(out, lse) of [b, h, s, d] in float64: the sink is a further column of the logits."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    column = sinks[:, None, None].expand(*logits.shape[:3], 1)
    logits = torch.cat([logits, column], -1)
    return torch.softmax(logits, -1)[..., :-1] @ v, logits.logsumexp(-1)


def problem(s=60, sk=60, h=4, hk=2, d=32, dv=32):
    make = torch.randn
    q, k, v = make(2, h, s, d), make(2, hk, sk, d), make(2, hk, sk, dv)
    return q, k, v, make(h) * 2, make(2, h, s, dv), make(2, h, s)


def compare(function, q, k, v, sinks, dout, dlse, mask):
    """function(q, k, v, sinks) gives (out, lse) of [b, h, s, d] tensors."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    wanted = [t.double().requires_grad_() for t in (q, k, v, sinks)]
    got, want = function(*leaves), exact(*wanted, mask)
    check("out", got[0], want[0])
    assert (got[1] - want[1]).abs().max() < 2 * LSE
    loss = lambda out, lse: (out * dout).sum() + (lse * dlse).sum()
    grads = zip(
        ("dq", "dk", "dv", "dsinks"),
        torch.autograd.grad(loss(*got), leaves),
        torch.autograd.grad(loss(*want), wanted),
    )
    for name, a, b in grads:
        check(name, a, b)


@pytest.mark.parametrize("dv", [32, 20])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_attention(layout, dv):
    turn = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)

    def function(q, k, v, sinks):
        out, lse = sagebwd.attention(
            *(turn(t) for t in (q, k, v)), causal=True, sinks=sinks, layout=layout, return_lse=True
        )
        return turn(out), lse

    compare(function, *problem(dv=dv), visible(60, 60, causal=True))


def test_packed():
    cu = torch.tensor([0, 60, 120], dtype=torch.int32)

    def function(q, k, v, sinks):
        flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        out, lse = sagebwd.attention_varlen(
            *flat, cu, cu, causal=True, sinks=sinks, return_lse=True
        )
        lse = lse.unflatten(1, (2, 60)).transpose(0, 1)
        return out.unflatten(0, (2, 60)).transpose(1, 2), lse

    compare(function, *problem(), visible(60, 60, causal=True))


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
def test_flash_attention_has_a_name_for_them(name):
    def function(q, k, v, sinks):
        turned = (t.transpose(1, 2) for t in (q, k, v))
        options = dict(causal=True, return_attn_probs=True)
        out, lse, _ = sagebwd.flash_attn_func(*turned, **options, **{name: sinks})
        return out.transpose(1, 2), lse

    q, k, v, sinks, dout, dlse = problem()
    compare(function, q, k, v, sinks, dout, dlse, visible(60, 60, causal=True))

    # The other functions pass it on.
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    given, want = {name: sinks}, sagebwd.attention(q, k, v, sinks=sinks)
    kv = torch.stack([k, v], 2)
    assert torch.equal(sagebwd.flash_attn_kvpacked_func(q, kv, **given), want)
    cu = torch.tensor([0, 60, 120], dtype=torch.int32)
    flat = lambda t: t.flatten(0, 1)
    lengths = (cu, cu, 60, 60)
    packed = sagebwd.flash_attn_varlen_func(flat(q), flat(k), flat(v), *lengths, **given)
    assert torch.allclose(packed, flat(want), atol=1e-6)
    packed = sagebwd.flash_attn_varlen_kvpacked_func(flat(q), flat(kv), *lengths, **given)
    assert torch.allclose(packed, flat(want), atol=1e-6)
    qkv = torch.stack([q, q, q], 2)
    want = sagebwd.attention(q, q, q, sinks=sinks)
    assert torch.equal(sagebwd.flash_attn_qkvpacked_func(qkv, **given), want)
    packed = sagebwd.flash_attn_varlen_qkvpacked_func(flat(qkv), cu, 60, **given)
    assert torch.allclose(packed, flat(want), atol=1e-6)
    want = sagebwd.attention(q, k, v, sinks=sinks)
    assert torch.equal(kv_cache.flash_attn_with_kvcache(q, k, v, **given), want)


def test_both_names_are_refused():
    q, sinks = torch.randn(1, 8, 2, 32), torch.zeros(2)
    with pytest.raises(ValueError, match="s_aux, learnable_sink"):
        sagebwd.flash_attn_func(q, q, q, s_aux=sinks, learnable_sink=sinks)


def test_queries_that_see_no_key():
    q, k, v, sinks, dout, dlse = problem(s=6, sk=3)  # the first three see none
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    for none in (False, True):
        with torch.no_grad():
            leaves[3].copy_(torch.full_like(sinks, -math.inf) if none else sinks)
        out, lse = sagebwd.attention(
            *leaves[:3], causal=True, sinks=leaves[3], layout="bhsd", return_lse=True
        )
        assert not out[:, :, :3].any()
        assert torch.equal(lse[:, :, :3], leaves[3].detach()[:, None].expand(2, 4, 3))
        loss = (out * dout).sum() + lse[torch.isfinite(lse)].sum()
        grads = torch.autograd.grad(loss, leaves)
        assert all(torch.isfinite(g).all() for g in grads)
    plain = sagebwd.attention(*leaves[:3], causal=True, layout="bhsd")
    assert torch.equal(out, plain), "a sink of -inf is none"


def test_sinks_of_16_bits_and_compiled_code():
    q, k, v, sinks, dout, _ = problem()
    q, k, v = (t.bfloat16() for t in (q, k, v))
    leaf = sinks.bfloat16().requires_grad_()

    def function(sinks):
        return sagebwd.attention(q, k, v, layout="bhsd", sinks=sinks)

    out = function(leaf)
    assert out.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(out, leaf, dout.bfloat16())
    assert grad.dtype == torch.bfloat16 and grad.any()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(leaf)
    assert torch.equal(compiled, out)


def test_sinks_that_do_not_fit_are_refused():
    q, k, v, sinks, *_ = problem()
    call = lambda sinks: sagebwd.attention(q, k, v, layout="bhsd", sinks=sinks)
    with pytest.raises(ValueError, match=r"sinks: expected one float for each of q's 4 heads"):
        call(sinks[:2])
    with pytest.raises(ValueError, match="sinks: expected one float"):
        call(sinks.long())
    with pytest.raises(TypeError, match="sinks: expected a torch.Tensor, got float"):
        call(0.5)
    support = sagebwd.is_supported(q, k, v, layout="bhsd", sinks=sinks[:2])
    assert not support and "4 heads" in support.reason
    assert sagebwd.is_supported(q, k, v, layout="bhsd", sinks=sinks)
