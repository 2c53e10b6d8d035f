# SPDX-License-Identifier: Apache-2.0
"""Each drop-in against its original's rule: names, order, layout, alignment; and what it
refuses."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import sagebwd
from reference import LSE, LSE_ONE_KEY, check, exact, exact_grads, grads_of, qkv, visible

ORIGINALS = {
    # Of flash-attn 2.8, SageAttention 2.2 (less its **kwargs) and PyTorch.
    "flash_attn_func": "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None",
    "sageattn": "q, k, v, tensor_layout='HND', is_causal=False, sm_scale=None, return_lse=False",
    "sageattn_varlen": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    "is_causal=False, sm_scale=None, smooth_k=True",
    "scaled_dot_product_attention": "query, key, value, attn_mask=None, dropout_p=0.0, "
    "is_causal=False, scale=None, enable_gqa=False",
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_signature(name):
    assert str(inspect.signature(getattr(sagebwd, name))) == f"({ORIGINALS[name]})"


@pytest.mark.parametrize("sq, sk", [(50, 50), (30, 80), (80, 30)])
@pytest.mark.parametrize("causal", [False, True])
def test_19_flash_is_bottom_right(sq, sk, causal):
    q, k, v, dout = qkv(h=4, hk=2, s=sq, sk=sk)
    want = exact_grads(q, k, v, dout, visible(sq, sk, causal), scale=0.2)
    f = lambda *t: sagebwd.flash_attn_func(
        *(x.transpose(1, 2) for x in t), softmax_scale=0.2, causal=causal
    ).transpose(1, 2)
    for name, a, b in zip(
        ("out", "dq", "dk", "dv"), grads_of(f, q, k, v, dout), (want[0], *want[2:])
    ):
        check(name, a, b)


def test_flash_returns_lse():
    q, k, v, _ = qkv()
    out, lse, probs = sagebwd.flash_attn_func(
        *(t.transpose(1, 2) for t in (q, k, v)), return_attn_probs=True
    )
    torch.testing.assert_close(lse.double(), exact(q, k, v)[1], atol=LSE, rtol=0)
    assert probs is None


def test_flash_varlen_as_nanochat_calls_it():
    q = torch.randn(90, 4, 64)
    cu = torch.tensor([0, 30, 90, 90, 90], dtype=torch.int32)  # padded with empty documents
    out = sagebwd.flash_attn_varlen_func(
        q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=60, max_seqlen_k=60, causal=True,
        softmax_scale=0.1, window_size=(16, 0),
    )  # fmt: skip
    for a, b in ((0, 30), (30, 90)):
        x = q[a:b].transpose(0, 1)[None]
        want, _ = exact(x, x, x, visible(b - a, b - a, True, (16, 0)), scale=0.1)
        check("out", out[a:b].transpose(0, 1)[None], want)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_sageattn(layout):
    q, k, v, dout = qkv(s=90)
    turn = (lambda t: t.transpose(1, 2)) if layout == "NHD" else (lambda t: t)
    want = exact_grads(q, k, v, dout, visible(90, 90, True), scale=0.15)
    f = lambda *t: turn(sagebwd.sageattn(*map(turn, t), layout, True, 0.15))
    for name, a, b in zip(
        ("out", "dq", "dk", "dv"), grads_of(f, q, k, v, dout), (want[0], *want[2:])
    ):
        check(name, a, b)
    _, lse = sagebwd.sageattn(*map(turn, (q, k, v)), layout, True, 0.15, return_lse=True)
    torch.testing.assert_close(lse.double(), want[1], atol=LSE_ONE_KEY, rtol=0)


def test_19_sageattn_causal_is_square_only():
    q, k = torch.randn(1, 2, 8, 64), torch.randn(1, 2, 12, 64)
    with pytest.raises(NotImplementedError, match="as many keys as queries"):
        sagebwd.sageattn(q, k, k, is_causal=True)


def test_19_sageattn_varlen_causal_is_square_only():
    q, k = torch.randn(20, 2, 64), torch.randn(24, 2, 64)
    cu = lambda *ends: torch.tensor([0, *ends], dtype=torch.int32)
    # The second has equal longest lengths, and documents that differ.
    for cu_k, longest in ((cu(12, 24), 12), (cu(14, 24), 14)):
        with pytest.raises(NotImplementedError, match="as many keys as queries"):
            sagebwd.sageattn_varlen(q, k, k, cu(6, 20), cu_k, 14, longest, is_causal=True)
    x = q.requires_grad_()
    same = sagebwd.sageattn_varlen(x, x, x, cu(6, 20), cu(6, 20), 14, 14, is_causal=True)
    want = sagebwd.attention_varlen(x, x, x, cu(6, 20), cu(6, 20), causal=True)
    assert torch.equal(same, want)


def test_lora_trainers_probe():
    """B1 H2 L8 D64 fp16 must give a grad_fn and finite gradients, and sageattn_varlen must
    exist."""
    q, k, v = (torch.randn(1, 2, 8, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    out = sagebwd.sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=0.125)
    assert out.grad_fn is not None
    out.float().square().sum().backward()
    for t in (q, k, v):
        assert torch.isfinite(t.grad).all() and t.grad.abs().sum() > 0
    assert callable(sagebwd.sageattn_varlen)


def test_sageattn_varlen():
    q = torch.randn(70, 2, 64)
    cu = torch.tensor([0, 20, 70], dtype=torch.int32)
    smooth = sagebwd.sageattn_varlen(q, q, q + 3, cu, cu, 50, 50, is_causal=True)
    rough = sagebwd.sageattn_varlen(q, q, q + 3, cu, cu, 50, 50, is_causal=True, smooth_k=False)
    assert not torch.equal(smooth, rough)
    for a, b in ((0, 20), (20, 70)):
        x = q[a:b].transpose(0, 1)[None]
        want, _ = exact(x, x, x + 3, visible(b - a, b - a, True))
        check("out", smooth[a:b].transpose(0, 1)[None], want)


@pytest.mark.parametrize("sq, sk", [(50, 50), (30, 80), (80, 30)])
@pytest.mark.parametrize("causal", [False, True])
def test_19_sdpa_is_top_left(sq, sk, causal):
    q, k, v, dout = qkv(h=4, hk=2, s=sq, sk=sk)
    options = dict(is_causal=causal, scale=0.2, enable_gqa=True)
    want = grads_of(
        lambda *t: F.scaled_dot_product_attention(*t, **options),
        *(t.double() for t in (q, k, v, dout)),
    )
    got = grads_of(lambda *t: sagebwd.scaled_dot_product_attention(*t, **options), q, k, v, dout)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        check(name, a, b)


def test_sdpa_three_dimensions():
    q = torch.randn(4, 30, 64)
    check(
        "out",
        sagebwd.scaled_dot_product_attention(q, q, q),
        F.scaled_dot_product_attention(q, q, q),
    )
    with pytest.raises(NotImplementedError, match="3 or 4 dimensions"):
        sagebwd.scaled_dot_product_attention(q[0], q[0], q[0])


def _flash_varlen(q, k, v, **kw):
    cu = torch.tensor([0, 12, 30], dtype=torch.int32)
    return sagebwd.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 18, 18, **kw)


def _sage_varlen(q, k, v, **kw):
    cu = torch.tensor([0, 12, 30], dtype=torch.int32)
    return sagebwd.sageattn_varlen(q[0], k[0], v[0], cu, cu, 18, 18, **kw)


@pytest.mark.parametrize(
    "call, arguments",
    [
        (sagebwd.flash_attn_func, dict(softmax_scale=0.3, causal=True, window_size=(4, 2))),
        (_flash_varlen, dict(softmax_scale=0.3, causal=True, window_size=(4, 2))),
        (sagebwd.sageattn, dict(sm_scale=0.3, is_causal=True, tensor_layout="NHD")),
        (_sage_varlen, dict(sm_scale=0.3, is_causal=True, smooth_k=False)),
        (sagebwd.scaled_dot_product_attention, dict(scale=0.3, is_causal=True)),
    ],
    ids=["flash", "flash_varlen", "sage", "sage_varlen", "sdpa"],
)
def test_25_every_argument_counts(call, arguments):
    q, k, v = (torch.randn(1, 30, 30, 64) for _ in range(3))  # layouts differ in meaning, not shape
    k = k + 1
    plain = call(q, k, v)
    for name, value in arguments.items():
        assert not torch.equal(call(q, k, v, **{name: value}), plain), f"{name} was ignored"


def test_25_deterministic_counts(monkeypatch):
    """The flag changes no result on a CPU: it must reach the operator."""
    seen = []
    forward = sagebwd.ops.forward

    def watched(*args, deterministic, **kw):
        seen.append(deterministic)
        return forward(*args, deterministic=deterministic, **kw)

    monkeypatch.setattr(sagebwd.ops, "forward", watched)
    q = torch.randn(1, 30, 2, 64)
    for call in (sagebwd.flash_attn_func, _flash_varlen, sagebwd.attention):
        call(q, q, q, deterministic=True)
        call(q, q, q, deterministic=False)
    assert seen == [True, False] * 3


SLOPES = torch.ones(2)
CU = torch.tensor([0, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, **kw: sagebwd.flash_attn_func(q, q, q, **kw),
        lambda q, **kw: sagebwd.flash_attn_varlen_func(q[0], q[0], q[0], CU, CU, 8, 8, **kw),
        lambda q, **kw: sagebwd.sageattn(q, q, q, **kw),
        lambda q, **kw: sagebwd.sageattn_varlen(q[0], q[0], q[0], CU, CU, 8, 8, **kw),
        lambda q, **kw: sagebwd.scaled_dot_product_attention(q, q, q, **kw),
        lambda q, **kw: sagebwd.attention(q, q, q, **kw),
    ],
    ids=["flash", "flash_varlen", "sage", "sage_varlen", "sdpa", "attention"],
)
def test_25_unknown_keywords_raise(call):
    q = torch.randn(1, 8, 2, 64)
    for keyword in ("mask", "attention_mask", "smooth_q", "bias", "pv_accum_dtype", "attn_bias"):
        with pytest.raises(TypeError, match=keyword):
            call(q, **{keyword: None})


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda q: sagebwd.flash_attn_func(q, q, q, 0.1), "dropout_p"),
        (lambda q: sagebwd.flash_attn_func(q, q, q, softcap=30.0), "softcap"),
        (lambda q: sagebwd.flash_attn_func(q, q, q, alibi_slopes=SLOPES), "alibi_slopes"),
        (
            lambda q: sagebwd.flash_attn_varlen_func(q[0], q[0], q[0], CU, CU, 8, 8, 0.1),
            "dropout_p",
        ),
        (
            lambda q: sagebwd.flash_attn_varlen_func(q[0], q[0], q[0], CU, CU, 8, 8, softcap=1.0),
            "softcap",
        ),
        (
            lambda q: sagebwd.flash_attn_varlen_func(
                q[0], q[0], q[0], CU, CU, 8, 8, alibi_slopes=SLOPES
            ),
            "alibi_slopes",
        ),
        (
            lambda q: sagebwd.flash_attn_varlen_func(
                q[0], q[0], q[0], CU, CU, 8, 8, block_table=CU
            ),
            "block_table",
        ),
        (
            lambda q: sagebwd.scaled_dot_product_attention(q, q, q, torch.ones(2, 2) > 0),
            "attn_mask",
        ),
        (lambda q: sagebwd.scaled_dot_product_attention(q, q, q, None, 0.1), "dropout_p"),
    ],
)
def test_25_unsupported_values_raise(call, words):
    with pytest.raises(NotImplementedError, match=words):
        call(torch.randn(1, 8, 2, 64))


def test_sdpa_needs_enable_gqa():
    q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 8, 64)
    with pytest.raises(ValueError, match="enable_gqa"):
        sagebwd.scaled_dot_product_attention(q, k, k)
