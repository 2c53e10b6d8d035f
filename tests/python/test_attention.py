# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen against exact attention: shapes, masks, layouts, dtypes, switches,
refusals."""

import pytest
import torch

import sagebwd
from reference import (
    HAS_ORACLE,
    LSE_ONE_KEY,
    ORACLE,
    check,
    exact,
    exact_grads,
    grads_of,
    oracle,
    qkv,
    rel,
    visible,
)
from sagebwd.recipe import MATMULS

MASKS = [
    dict(causal=False),
    dict(causal=True),
    dict(causal=True, window_size=(20, 0)),
    dict(window_size=(17, 9)),
    dict(window_size=(-1, 5), align="top_left"),
    dict(causal=True, align="top_left"),
]


def mask_of(sq, sk, causal=False, window_size=(-1, -1), align="bottom_right"):
    return visible(sq, sk, causal, window_size, align)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sq, sk", [(130, 130), (65, 200), (127, 40), (1, 70), (8, 8)])
def test_masks_and_lengths(mask, sq, sk):
    q, k, v, dout = qkv(h=4, hk=2, s=sq, sk=sk)
    want = exact_grads(q, k, v, dout, mask_of(sq, sk, **mask))
    out, lse = sagebwd.attention(q, k, v, layout="bhsd", return_lse=True, **mask)
    finite = torch.isfinite(want[1])
    assert torch.equal(torch.isneginf(lse), ~finite)
    torch.testing.assert_close(lse[finite].double(), want[1][finite], atol=LSE_ONE_KEY, rtol=0)
    if HAS_ORACLE:
        with oracle():
            _, recipe_lse = sagebwd.attention(q, k, v, layout="bhsd", return_lse=True, **mask)
        torch.testing.assert_close(lse, recipe_lse, atol=ORACLE, rtol=0)
    got = grads_of(lambda *t: sagebwd.attention(*t, layout="bhsd", **mask), q, k, v, dout)
    assert torch.equal(got[0], out)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
        check(name, a, b)
    assert (got[0][~finite] == 0).all() and (got[1][~finite] == 0).all()


@pytest.mark.parametrize("d", [8, 16, 40, 64, 72, 80, 96, 128, 256])
def test_head_dims(d):
    q, k, v, dout = qkv(s=70, d=d)
    want = exact_grads(q, k, v, dout)
    got = grads_of(lambda *t: sagebwd.attention(*t, layout="bhsd"), q, k, v, dout)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
        check(name, a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dtypes_and_layouts(dtype, layout):
    q, k, v, dout = qkv(b=2, s=100, dtype=dtype)
    want = exact_grads(q, k, v, dout, visible(100, 100, True))
    turn = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    got = grads_of(
        lambda *t: turn(sagebwd.attention(*(turn(x) for x in t), causal=True, layout=layout)),
        q, k, v, dout,
    )  # fmt: skip
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
        assert a.dtype == dtype
        check(name, a, b)
    # Contiguous tensors of the other layout are the same numbers in another order: the same bits
    # come out.
    other = "bhsd" if layout == "bshd" else "bshd"
    back = (lambda t: t.transpose(1, 2)) if other == "bshd" else (lambda t: t)
    again = back(
        sagebwd.attention(*(back(x).contiguous() for x in (q, k, v)), causal=True, layout=other)
    )
    assert torch.equal(again, got[0])


def test_22_grouped_queries_equal_repeated_keys():
    q, k, v, dout = qkv(h=6, hk=2, s=90)
    f = lambda q, k, v: sagebwd.attention(q, k, v, layout="bhsd", causal=True)
    got = grads_of(f, q, k, v, dout)
    full = grads_of(f, q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), dout)
    assert torch.equal(got[0], full[0]) and torch.equal(got[1], full[1])
    for a, b in zip(got[2:], full[2:]):
        torch.testing.assert_close(a, b.unflatten(1, (2, 3)).sum(2), rtol=1e-4, atol=1e-5)


def test_packed_equals_dense_per_document():
    lengths_q, lengths_k = [33, 0, 70, 1], [40, 5, 70, 0]
    cu = lambda ls: torch.tensor([0, *ls], dtype=torch.int32).cumsum(0).to(torch.int32)
    q, dout = torch.randn(sum(lengths_q), 4, 64), torch.randn(sum(lengths_q), 4, 64)
    k, v = torch.randn(sum(lengths_k), 2, 64), torch.randn(sum(lengths_k), 2, 64)
    f = lambda q, k, v: sagebwd.attention_varlen(
        q, k, v, cu(lengths_q), cu(lengths_k), 70, 70, causal=True
    )
    got = grads_of(f, q, k, v, dout)
    splits = (lengths_q, lengths_q, lengths_k, lengths_k)
    pieces = zip(
        *(t.split(n) for t, n in zip((q, dout, k, v), splits)),
        *(t.split(n) for t, n in zip(got, splits)),
    )
    for qi, di, ki, vi, *gots in pieces:
        dense = grads_of(
            lambda *t: sagebwd.attention(*t, causal=True), qi[None], ki[None], vi[None], di[None]
        )
        for a, b in zip(gots, dense):
            assert torch.equal(a, b[0])


def test_varlen_lse_and_max_logit():
    q = torch.randn(50, 2, 64)
    cu = torch.tensor([0, 20, 50], dtype=torch.int32)
    out, lse, top = sagebwd.attention_varlen(
        q, q, q, cu, cu, return_lse=True, return_max_logit=True
    )
    assert lse.shape == (2, 50) and top.shape == (2, 2)
    for i, (a, b) in enumerate([(0, 20), (20, 50)]):
        x = q[a:b].transpose(0, 1)[None]
        _, want = exact(x, x, x)
        # q is k: every row is mostly its own token.
        torch.testing.assert_close(lse[:, a:b].double(), want[0], atol=LSE_ONE_KEY, rtol=0)
        logits = (x[0].double() @ x[0].double().transpose(-1, -2) / 8).amax((-1, -2))
        torch.testing.assert_close(top[i].double(), logits, atol=0.1, rtol=0)


def test_autocast():
    q, k, v = (torch.randn(1, 40, 2, 64, requires_grad=True) for _ in range(3))
    device = q.device.type
    with torch.autocast(device, torch.bfloat16):
        out = sagebwd.attention(q, k.half(), v)
        drop_in = sagebwd.flash_attn_func(q, k, v)
    assert out.dtype == drop_in.dtype == torch.bfloat16
    want = sagebwd.attention(q.bfloat16(), k.half().bfloat16(), v.bfloat16())
    assert torch.equal(out, want)
    out.sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.abs().sum() > 0
    with torch.autocast(device, torch.float16):
        assert sagebwd.attention(q, k, v).dtype == torch.float16
    assert sagebwd.attention(q, k, v).dtype == torch.float32


def test_backward_in_floating_point_is_closer():
    q, k, v, dout = qkv(s=300)
    want = exact_grads(q, k, v, dout)[2:]
    run = lambda **o: grads_of(lambda *t: sagebwd.attention(*t, layout="bhsd", **o), q, k, v, dout)
    int8, bf16 = run(backward="int8"), run(backward="bf16")
    assert torch.equal(int8[0], bf16[0]), "the forward does not change"
    for a, b, w in zip(int8[1:], bf16[1:], want):
        assert rel(b, w) < 0.8 * rel(a, w)


def test_recipes_and_switches_change_the_numbers():
    q, k, v, dout = qkv(s=200)
    results = {}
    for name, recipe in {
        "vectorwise": "vectorwise",
        "paper": "paper",
        "rough means": sagebwd.Recipe(smooth_k=False, smooth_v=False),
        "smooth q": sagebwd.Recipe(smooth_q=True),
        "dither": sagebwd.Recipe(rounding="dither", seed=1),
        "dither again": sagebwd.Recipe(rounding="dither", seed=2),
        "exact S": sagebwd.Recipe(high_precision=("S", "S'")),
        "exact O": sagebwd.Recipe(pv16_tiles=-1),
        "tiles": sagebwd.Recipe(tile_q=128, tile_k=64),
    }.items():
        got = grads_of(
            lambda *t: sagebwd.attention(*t, layout="bhsd", recipe=recipe), q, k, v, dout
        )
        results[name] = torch.cat([t.flatten() for t in got])
    names = list(results)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not torch.equal(results[a], results[b]), f"{a} and {b} gave the same bits"
    want = exact_grads(q, k, v, dout)
    exact_s = grads_of(
        lambda *t: sagebwd.attention(
            *t, layout="bhsd", recipe=sagebwd.Recipe(high_precision=tuple(MATMULS))
        ),
        q, k, v, dout,
    )  # fmt: skip
    for a, b in zip(exact_s, (want[0], *want[2:])):
        assert rel(a, b) < 1e-5


def test_recipe_text_round_trip():
    assert sagebwd.Recipe().text() == "vectorwise"
    assert sagebwd.Recipe.paper().text() == "paper"
    text = sagebwd.Recipe.paper(smooth_v=True, rounding="dither").text(("dQ", "dK"))
    assert text == "paper smooth_v=1 rounding=dither high_precision=96"


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(layout="sbhd"), ValueError, "layout"),
        (dict(align="middle"), ValueError, "align"),
        (dict(backward="fp8"), ValueError, "backward"),
        (dict(recipe="best"), ValueError, "recipe"),
        (dict(window_size=(-2, 0)), ValueError, "window_size"),
        (dict(softmax_scale=0.0), ValueError, "softmax_scale"),
        (dict(dropout_p=0.1), TypeError, "dropout_p"),
        (dict(attn_mask=None), TypeError, "attn_mask"),
    ],
    ids=str,
)
def test_refused_arguments(arguments, error, words):
    q = torch.randn(1, 8, 2, 64)
    with pytest.raises(error, match=words):
        sagebwd.attention(q, q, q, **arguments)
    if error is ValueError:
        support = sagebwd.is_supported(q, q, q, **arguments)
        assert not support and words in support.reason


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda q, k, v: (q.double(), k.double(), v.double()), NotImplementedError, "float64"),
        (lambda q, k, v: (q.bfloat16(), k, v), ValueError, "one dtype"),
        (
            lambda q, k, v: (q[..., :12], k[..., :12], v[..., :12]),
            NotImplementedError,
            "multiple of 8",
        ),
        (lambda q, k, v: (q, k, v[..., :32]), NotImplementedError, "head dim of v"),
        (lambda q, k, v: (q, k[:, :, :1], v), ValueError, "one shape"),
        (lambda q, k, v: (q[0], k, v), ValueError, "4 dimensions"),
        (lambda q, k, v: (q.repeat(1, 1, 2, 1)[:, :, :3], k, v), ValueError, "multiple of k"),
        (lambda q, k, v: (q.repeat(2, 1, 1, 1), k, v), ValueError, "one batch size"),
    ],
)
def test_refused_tensors(change, error, words):
    tensors = change(*(torch.randn(1, 8, 2, 64) for _ in range(3)))
    with pytest.raises(error, match=words):
        sagebwd.attention(*tensors)
    support = sagebwd.is_supported(*tensors)
    assert not support and words in support.reason


def test_refused_offsets():
    q = torch.randn(8, 2, 64)
    cu = lambda *x: torch.tensor(x, dtype=torch.int32)
    for a, b, longest, words in [
        (cu(0, 9), cu(0, 8), None, "within the packed length"),
        (cu(0, 5, 3, 8), cu(0, 5, 3, 8), None, "non-decreasing"),
        (cu(1, 8), cu(0, 8), None, "start at 0"),
        (cu(0, 4, 8), cu(0, 8), None, "same length"),
        (cu(0, 8).long(), cu(0, 8), None, "int32"),
        (cu(0, 8), cu(0, 8), 7, "has length 8"),
    ]:
        with pytest.raises(ValueError, match=words):
            sagebwd.attention_varlen(q, q, q, a, b, longest)
        support = sagebwd.is_supported(q, q, q, a, b, longest)
        assert not support and words in support.reason


def test_cuda_key_declines_or_runs():
    """Without a device the operators still have a CUDA kernel: the same code path, reached by
    dispatch."""
    for op in ("fwd", "bwd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sagebwd::{op}", "CUDA")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sagebwd::{op}", "CPU")
