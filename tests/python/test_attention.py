# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen against exact attention: shapes, masks, layouts, dtypes, switches,
refusals."""

import math
import re

import numpy as np
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
from sagebwd._ops import attention as ops
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
    # Contiguous tensors of the other layout hold the same numbers in another order, so the result
    # has the same bits.
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
        assert rel(b, w) < 0.85 * rel(a, w)


def test_recipes_and_switches_change_the_numbers():
    q, k, v, dout = qkv(s=200)
    results = {}
    for name, recipe in {
        "vectorwise": "vectorwise",
        "paper": "paper",
        "without centres": "vectorwise smooth_k=off",
        "paper, smooth q": "paper smooth_q=on",
        "paper, rotated": "paper rotate=on",
        "dither": sagebwd.Recipe(rounding="dither", seed=1),
        "dither again": sagebwd.Recipe(rounding="dither", seed=2),
        "exact S": sagebwd.Recipe(high_precision=("S", "S'")),
        "exact O": sagebwd.Recipe(high_precision=("O",)),
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
    text = sagebwd.Recipe.paper(smooth_q=True, rounding="dither").text(("dQ", "dK"))
    assert text == "paper smooth_q=on rounding=dither lift=dQ,dK"
    assert sagebwd.Recipe(rounding="dither:dK,dQ,dV,O").text() == "vectorwise rounding=dither"
    text = sagebwd.Recipe(rotate=False, smooth_k=False, rounding="dither:dQ").text()
    assert text == "vectorwise smooth_k=off rotate=off rounding=dither:dQ"
    assert sagebwd.Recipe(save_codes=False).text() == "vectorwise", "it changes no number"


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(layout="sbhd"), ValueError, "layout"),
        (dict(align="middle"), ValueError, "align"),
        (dict(backward="fp8"), ValueError, "backward"),
        (dict(recipe="best"), ValueError, "recipe"),
        (dict(recipe=5), ValueError, "recipe"),
        (dict(window_size=(-2, 0)), ValueError, "window_size"),
        (dict(window_size=(3.7, 0)), TypeError, "window_size.*float 3.7"),
        (dict(window_size=(True, 0)), TypeError, "window_size.*bool True"),
        (dict(window_size=("1", 0)), TypeError, "window_size.*str '1'"),
        (dict(window_size=3), TypeError, "window_size.*pair"),
        (dict(window_size=(1, 2, 3)), TypeError, "window_size.*pair"),
        (dict(softmax_scale=0.0), ValueError, "softmax_scale"),
        (dict(softmax_scale=1e-50), ValueError, "softmax_scale.*float32, got 1e-50"),
        (dict(softmax_scale=1e39), ValueError, "softmax_scale.*1e[+]39"),
        (dict(softmax_scale=math.nan), ValueError, "softmax_scale.*nan"),
        (dict(softmax_scale=-math.inf), ValueError, "softmax_scale.*inf"),
        (dict(softmax_scale="0.3"), TypeError, "softmax_scale.*str '0.3'"),
        (dict(softmax_scale=True), TypeError, "softmax_scale.*bool"),
        (
            dict(softmax_scale=torch.tensor(0.3, device="cpu", requires_grad=True)),
            NotImplementedError,
            "softmax_scale.*multiply q",
        ),
        (dict(causal="False"), TypeError, "causal.*str 'False'"),
        (dict(causal=2), TypeError, "causal.*int 2"),
        (dict(causal=None), TypeError, "causal.*NoneType"),
        (dict(dropout_p=0.1), TypeError, "dropout_p"),
        (dict(attn_mask=None), TypeError, "attn_mask"),
    ],
    ids=str,
)
def test_refused_arguments(arguments, error, words):
    q = torch.randn(1, 8, 2, 64)
    with pytest.raises(error, match=words):
        sagebwd.attention(q, q, q, **arguments)
    if not {"dropout_p", "attn_mask"} & set(arguments):
        support = sagebwd.is_supported(q, q, q, **arguments)
        assert not support and re.search(words, support.reason)


@pytest.mark.parametrize("name", ["return_lse", "return_max_logit", "deterministic"])
def test_refused_flags(name):
    q = torch.randn(1, 8, 2, 64)
    with pytest.raises(TypeError, match=f"{name}.*'no'"):
        sagebwd.attention(q, q, q, **{name: "no"})


def test_numbers_of_other_kinds_count():
    """NumPy's integers and bools, Python ints for a scale, and windows beyond any sequence."""
    q, k, v, _ = qkv(s=40)
    call = lambda **o: sagebwd.attention(q, k, v, layout="bhsd", **o)
    same = [
        (dict(window_size=(np.int64(5), np.int32(2))), dict(window_size=(5, 2))),
        (dict(window_size=(None, 2**70)), dict()),
        (dict(window_size=(2**63 - 1, 0)), dict(causal=True)),
        (dict(causal=np.bool_(True)), dict(causal=True)),
        (dict(causal=0), dict()),
        (dict(softmax_scale=1), dict(softmax_scale=1.0)),
        (dict(softmax_scale=np.float32(0.5)), dict(softmax_scale=0.5)),
        (dict(softmax_scale=torch.tensor(0.5)), dict(softmax_scale=0.5)),
    ]
    for given, meant in same:
        assert torch.equal(call(**given), call(**meant)), given
    check("out", call(softmax_scale=-0.1), exact(q, k, v, scale=-0.1)[0])
    check("out", call(softmax_scale=1e-40), v.mean(2, keepdim=True).expand_as(v))


@pytest.mark.parametrize(
    "field, error",
    [
        (dict(tile_q=64.9), TypeError),
        (dict(tile_k=True), TypeError),
        (dict(tile_q="64"), TypeError),
        (dict(tile_q=-64), ValueError),
        (dict(seed=2**64), ValueError),
        (dict(seed=-1), ValueError),
        (dict(seed=1.0), TypeError),
        (dict(smooth_k=0.5), TypeError),
        (dict(smooth_q="no"), TypeError),
        (dict(rotate=None), TypeError),
        (dict(high_precision=3), ValueError),
        (dict(high_precision="S"), ValueError),
        (dict(high_precision=("Q",)), ValueError),
        (dict(smooth_p=True), TypeError),
        (dict(pv16_tiles=0), TypeError),
        (dict(p_levels=0), TypeError),
        (dict(smooth_v=False), TypeError),
    ],
    ids=str,
)
def test_refused_recipe_fields(field, error):
    Recipe = sagebwd.Recipe
    for make in (Recipe, Recipe.paper, Recipe.vectorwise):
        with pytest.raises(error, match=next(iter(field))):
            make(**field)


def test_seeds_of_64_bits():
    q, k, v, _ = qkv(s=130)
    call = lambda seed: sagebwd.attention(
        q, k, v, layout="bhsd", recipe=sagebwd.Recipe(rounding="dither", seed=seed)
    )
    outs = [call(seed) for seed in (1, 2**63 + 1, 2**64 - 1)]
    assert torch.equal(outs[1], call(2**63 + 1))
    assert not any(torch.equal(outs[i], outs[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda q, k, v: (q.double(), k.double(), v.double()), NotImplementedError, "float64"),
        (lambda q, k, v: (q.bfloat16(), k, v), ValueError, "one dtype"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v), NotImplementedError, "head dim: .*got 0"),
        (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 5)), NotImplementedError, "head dim of v"),
        (lambda q, k, v: (q, k[..., :32], v), ValueError, "one for q and k"),
        (lambda q, k, v: (q, k[:, :, :1], v), ValueError, "one shape"),
        (lambda q, k, v: (q[0], k, v), ValueError, "4 dimensions"),
        (lambda q, k, v: (q.repeat(1, 1, 2, 1)[:, :, :3], k, v), ValueError, "multiple of k"),
        (lambda q, k, v: (q.repeat(2, 1, 1, 1), k, v), ValueError, "one batch size"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), NotImplementedError, "int64"),
        (lambda q, k, v: (q.tolist(), k, v), TypeError, "q: expected a torch.Tensor, got list"),
        (lambda q, k, v: (q, None, v), TypeError, "k: expected a torch.Tensor, got NoneType"),
        (lambda q, k, v: (q, k, v.to_sparse()), NotImplementedError, "v: .*to_dense"),
    ],
)
def test_refused_tensors(change, error, words):
    tensors = change(*(torch.randn(1, 8, 2, 64) for _ in range(3)))
    with pytest.raises(error, match=words):
        sagebwd.attention(*tensors)
    support = sagebwd.is_supported(*tensors)
    assert not support and re.search(words, support.reason)


OFFSETS = [
    ((0, 9), (0, 8), None, "within the packed length"),
    ((0, 5, 3, 8), (0, 5, 3, 8), None, "non-decreasing"),
    ((0, -(2**31), 8), (0, -(2**31), 8), None, "non-decreasing"),
    ((1, 8), (0, 8), None, "start at 0"),
    ((8,), (8,), None, "start at 0"),  # one offset: no document
    ((100,), (100,), None, "start at 0"),
    ((), (), None, "at least one entry"),
    ((0, 4, 8), (0, 8), None, "same length"),
    ((0, 8), (0, 8), 7, "has length 8"),
    ((0, 8), (0, 8), 0, "has length 8"),
]


@pytest.mark.parametrize("cu_q, cu_k, longest, words", OFFSETS)
def test_refused_offsets(cu_q, cu_k, longest, words):
    q = torch.randn(8, 2, 64)
    # On the CPU, also beside tensors on a GPU: the values of offsets there are never looked at.
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in (cu_q, cu_k))
    with pytest.raises(ValueError, match=words):
        sagebwd.attention_varlen(q, q, q, cu_q, cu_k, longest)
    support = sagebwd.is_supported(q, q, q, cu_q, cu_k, longest)
    assert not support and words in support.reason
    # Graphs call the operator.
    options = ops.Options(cu_q, cu_k, -1 if longest is None else longest)
    with pytest.raises(RuntimeError, match=f"sagebwd.ValueError: .*{words}"):
        torch.ops.sagebwd.fwd(q, q, q, *options, False, False, False)


def test_refused_kinds_of_offsets_and_lengths():
    q = torch.randn(8, 2, 64)
    cu = torch.tensor([0, 8], dtype=torch.int32)
    call = lambda a, b=cu, longest=None: sagebwd.attention_varlen(q, q, q, a, b, longest, longest)
    for cu_q, error, words in [
        (cu.long(), ValueError, "int32"),
        (cu.float(), ValueError, "int32"),
        (cu[None], ValueError, "one-dimensional"),
        ([0, 8], TypeError, "got list"),
        (None, TypeError, "got NoneType"),
        (cu.to("meta"), ValueError, "got meta"),
    ]:
        with pytest.raises(error, match=words):
            call(cu_q)
    with pytest.raises(ValueError, match="got meta"):
        torch.ops.sagebwd.fwd(q, q, q, *ops.Options(cu.to("meta"), cu), *[False] * 3)
    for longest, error in [
        (-1, ValueError),
        (2**63, ValueError),
        (8.0, TypeError),
        (True, TypeError),
        ("8", TypeError),
        (torch.tensor(8), TypeError),
    ]:
        with pytest.raises(error, match="max_seqlen_q"):
            call(cu, cu, longest)
    assert torch.equal(call(cu, cu, np.int64(8)), call(cu))


def test_no_document_at_all():
    q = torch.randn(8, 2, 64)
    none = torch.zeros(1, dtype=torch.int32)
    leaves = [q.clone().requires_grad_() for _ in range(3)]
    out, lse, top = sagebwd.attention_varlen(
        *leaves, none, none, return_lse=True, return_max_logit=True
    )
    assert (out == 0).all() and torch.isneginf(lse).all() and top.shape == (0, 2)
    for g in torch.autograd.grad(out.sum(), leaves):
        assert (g == 0).all()


def test_cuda_key_declines_or_runs():
    """Without a device the operators still have a CUDA kernel: the same code path, reached by
    dispatch."""
    for op in ("fwd", "bwd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sagebwd::{op}", "CUDA")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sagebwd::{op}", "CPU")
