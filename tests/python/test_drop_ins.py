# SPDX-License-Identifier: Apache-2.0
"""Each drop-in against its original's rule: names, order, layout, alignment; and what it
refuses."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import sagebwd
from reference import LSE, LSE_ONE_KEY, check, exact, exact_grads, grads_of, qkv, visible

FLASH = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
ORIGINALS = {
    # Of flash-attn 2.8, SageAttention 2.2 (less its **kwargs) and PyTorch.
    "flash_attn_func": "q, k, v, " + FLASH,
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    + FLASH
    + ", block_table=None",
    "flash_attn_qkvpacked_func": "qkv, " + FLASH,
    "flash_attn_kvpacked_func": "q, kv, " + FLASH,
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, " + FLASH,
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
    "max_seqlen_k, " + FLASH,
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    # The original swallows every other keyword; these two it names elsewhere, and they count.
    "sageattn": "q, k, v, tensor_layout='HND', is_causal=False, sm_scale=None, return_lse=False, "
    "*, attn_mask=None, smooth_k=True",
    "sageattn_varlen": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    "is_causal=False, sm_scale=None, smooth_k=True",
    "scaled_dot_product_attention": "query, key, value, attn_mask=None, dropout_p=0.0, "
    "is_causal=False, scale=None, enable_gqa=False",
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_signature(name):
    later = {
        "flash": ", *, s_aux=None, learnable_sink=None, recipe='vectorwise'",
        "sageattn": ", recipe='vectorwise'",
        "sageattn_varlen": ", *, recipe='vectorwise'",
    }.get("flash" if name.startswith("flash") else name, "")
    signature = inspect.signature(getattr(sagebwd, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({ORIGINALS[name]}{later})"


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


@pytest.mark.parametrize("packed", ["qkv", "kv"])
@pytest.mark.parametrize("varlen", [False, True])
def test_stacked_tensors_and_their_gradients(packed, varlen):
    """The stacked forms are the plain ones on the parts, bit for bit, gradients included."""
    lead = (70,) if varlen else (2, 35)
    cu = torch.tensor([0, 30, 70], dtype=torch.int32)
    q, k, v = (torch.randn(*lead, 2, 64) for _ in range(3))
    dout = torch.randn(*lead, 2, 64)
    options = dict(softmax_scale=0.2, causal=True, window_size=(20, 0), recipe="paper")
    plain = sagebwd.flash_attn_varlen_func if varlen else sagebwd.flash_attn_func
    offsets = (cu, cu, 40, 40) if varlen else ()
    want = grads_of(lambda *t: plain(*t, *offsets, **options), q, k, v, dout)
    name = f"flash_attn_{'varlen_' if varlen else ''}{packed}packed_func"
    if packed == "qkv":
        leaves = [torch.stack([q, k, v], -3).requires_grad_()]
        offsets = (cu, 40) if varlen else ()
    else:
        leaves = [q.clone().requires_grad_(), torch.stack([k, v], -3).requires_grad_()]
    out, lse, probs = getattr(sagebwd, name)(*leaves, *offsets, return_attn_probs=True, **options)
    assert torch.equal(out, want[0]) and lse.shape[-1] == lead[-1] and probs is None
    grads = torch.autograd.grad(out, leaves, dout)
    got = grads[0].unbind(-3) if packed == "qkv" else (grads[0], *grads[1].unbind(-3))
    for a, b in zip(got, want[1:], strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=f"{packed}: expected .*heads, head dim"):
        getattr(sagebwd, name)(*leaves[:-1], leaves[-1][..., :1, :, :], *offsets)
    with pytest.raises(TypeError, match=f"{packed}: expected a torch.Tensor"):
        getattr(sagebwd, name)(*leaves[:-1], None, *offsets)


def _decode(q, k_cache, v_cache, starts, ends, causal, window):
    """What the cached call must give, row by row, in float64."""
    rows = []
    for i, (a, e) in enumerate(zip(starts, ends)):
        parts = (q[i : i + 1], k_cache[i : i + 1, a:e], v_cache[i : i + 1, a:e])
        parts = [t.transpose(1, 2) for t in parts]
        mask = visible(q.shape[1], max(e - a, 0), causal, window)
        rows.append(exact(*parts, mask, scale=0.2))
    outs, lses = zip(*rows)
    return torch.cat(outs).transpose(1, 2), torch.cat(lses)


@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (True, (9, 0))])
@pytest.mark.parametrize("lengths", [(20, 20, 20), (33, 0, 7)])
@pytest.mark.parametrize("new", [0, 3])
def test_kv_cache(causal, window, lengths, new):
    q = torch.randn(3, 3, 4, 64)
    caches = [torch.randn(3, 40, 2, 64) for _ in range(2)]
    fresh = [torch.randn(3, new, 2, 64) for _ in range(2)]
    want = [c.clone() for c in caches]
    for c, f in zip(want, fresh):
        for i, n in enumerate(lengths):
            c[i, n : n + new] = f[i]
    ends = [n + new for n in lengths]
    same = len(set(lengths)) == 1
    seqlens = lengths[0] if same else torch.tensor(lengths, dtype=torch.int32)
    given = fresh if new else (None, None)
    out, lse = sagebwd.flash_attn_with_kvcache(
        q, *caches, *given, cache_seqlens=seqlens, softmax_scale=0.2, causal=causal,
        window_size=window, return_softmax_lse=True,
    )  # fmt: skip
    for a, b in zip(caches, want):
        assert torch.equal(a, b)
    want_out, want_lse = _decode(q, *want, [0, 0, 0], ends, causal, window)
    check("out", out, want_out)
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    torch.testing.assert_close(lse[seen].double(), want_lse[seen], atol=LSE_ONE_KEY, rtol=0)
    # What is not part of a row must not count, whatever it holds.
    for c in caches:
        for i, e in enumerate(ends):
            c[i, e:] = float("nan")
    again = sagebwd.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=ends[0] if same else torch.tensor(ends, dtype=torch.int32),
        softmax_scale=0.2, causal=causal, window_size=window,
    )  # fmt: skip
    assert torch.equal(again, out)


def test_kv_cache_rows_and_left_padding():
    q = torch.randn(2, 1, 4, 64)
    caches = [torch.randn(5, 30, 2, 64) for _ in range(2)]
    int32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    before = [c.clone() for c in caches]
    k, v = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    out = sagebwd.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=int32(12, 25), cache_batch_idx=int32(3, 1),
        cache_leftpad=int32(2, 9), softmax_scale=0.2, causal=True,
    )  # fmt: skip
    for c, f, old in zip(caches, (k, v), before):
        old[3, 12], old[1, 25] = f[0, 0], f[1, 0]
        assert torch.equal(c, old)
    want, _ = _decode(q, *(c[[3, 1]] for c in caches), [2, 9], [13, 26], True, (-1, -1))
    check("out", out, want)
    whole = sagebwd.flash_attn_with_kvcache(q, caches[0][:2], caches[1][:2], softmax_scale=0.2)
    want, _ = _decode(q, *(c[:2] for c in caches), [0, 0], [30, 30], False, (-1, -1))
    check("out", whole, want)


@pytest.mark.cpu_only  # lengths on a GPU are not looked at; a wrong one ends in an assertion there
def test_kv_cache_refusals():
    q, cache = torch.randn(2, 1, 2, 64), torch.randn(2, 8, 2, 64)
    new = torch.randn(2, 1, 2, 64)
    before = cache.clone()
    call = lambda q=q, k=new, v=new, cache=cache, **o: sagebwd.flash_attn_with_kvcache(
        q, cache, cache, k, v, **{"cache_seqlens": 4, **o}
    )
    int32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    for options, error, words in [
        (dict(rotary_cos=q), NotImplementedError, "rotary_cos.*rotate q and k before"),
        (dict(block_table=int32(1)), NotImplementedError, "block_table.*gather the pages"),
        (dict(alibi_slopes=SLOPES), NotImplementedError, "alibi_slopes"),
        (dict(softcap=-5.0), ValueError, "softcap"),
        (dict(num_splits=4), NotImplementedError, "num_splits"),
        (dict(q=q.clone().requires_grad_()), NotImplementedError, "no_grad"),
        (dict(cache_seqlens=8), ValueError, "cache_seqlens.*from 0 to 7"),
        (dict(cache_seqlens=4.0), TypeError, "cache_seqlens"),
        (dict(cache_seqlens=int32(4, 8)), ValueError, "cache_seqlens.*from 0 to 7"),
        (dict(cache_seqlens=int32(4)), ValueError, "cache_seqlens"),
        (dict(cache_seqlens=None), ValueError, "cache_seqlens"),
        (dict(cache_batch_idx=int32(0)), ValueError, "cache_batch_idx"),
        (dict(v=None), ValueError, "both or neither"),
        (dict(k=new[:1]), ValueError, "k: expected"),
        (dict(v=new.half()), ValueError, "v: expected"),
        (dict(q=q[:1]), ValueError, "k_cache: expected q's batch size 1"),
        (dict(q=q.half()), ValueError, "k_cache"),
        (dict(window_size=(2.5, 0)), TypeError, "window_size"),
    ]:
        with pytest.raises(error, match=words):
            call(**options)
    assert torch.equal(cache, before), "refused before anything is written"


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_sageattn_smooth_k(layout):
    q, k, v, _ = qkv(s=90)
    if layout == "NHD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    rough = sagebwd.sageattn(q, k + 3, v, layout, smooth_k=False)
    name = {"HND": "bhsd", "NHD": "bshd"}[layout]
    want = sagebwd.attention(q, k + 3, v, layout=name, recipe=sagebwd.Recipe(smooth_k=False))
    assert torch.equal(rough, want)
    assert not torch.equal(rough, sagebwd.sageattn(q, k + 3, v, layout))
    with pytest.raises(TypeError, match="smooth_k"):
        sagebwd.sageattn(q, k, v, layout, smooth_k="yes")


def _padding(left, right):
    """[3, 1, 1, 60]: keys that are there, padded at either side."""
    at = torch.arange(60)
    return torch.stack([(at >= left * i) & (at < 60 - right * i) for i in range(3)])[:, None, None]


TRIANGLE = visible(60, 60, True)
BLOCKS = torch.block_diag(*[torch.ones(n, n) for n in (10, 30, 20)]).bool()
SPLIT = torch.arange(60) % 3  # three documents, their tokens between each other
ATTN_MASKS = {
    "right padding": _padding(0, 13),
    "left padding": _padding(13, 0),
    "both sides": _padding(5, 9),
    "a hole": _padding(0, 0) & (torch.arange(60) != 17),
    "causal": TRIANGLE,
    "causal, right padding": _padding(0, 13) & TRIANGLE,
    "causal, left padding": _padding(13, 0) & TRIANGLE,
    "window": visible(60, 60, True, (11, 0)),
    "window, left padding": _padding(13, 0) & visible(60, 60, True, (11, 0)),
    "window on both sides": visible(60, 60, False, (7, 4))[None],
    "documents": BLOCKS,
    "causal documents": BLOCKS & TRIANGLE,
    "split documents": SPLIT[:, None] == SPLIT,
    "shared keys": (SPLIT[:, None] == SPLIT) | (torch.arange(60) < 20),
    "everything": torch.ones(60, dtype=torch.bool),
    "nothing": torch.zeros(60, dtype=torch.bool),
}


@pytest.mark.parametrize("call", ["sageattn", "scaled_dot_product_attention"])
@pytest.mark.parametrize("name", ATTN_MASKS)
def test_masks_that_kernels_know(call, name):
    mask = ATTN_MASKS[name].to(torch.get_default_device())
    q, k, v, dout = qkv(b=3, h=4, hk=4, s=60)
    full = mask.expand(3, 4, 60, 60)
    want = exact_grads(q, k, v, dout, full)
    f = getattr(sagebwd, call)
    hidden = (-torch.inf, -1e4) if full.any(-1).all() else (-torch.inf,)
    for form in (mask, *(torch.zeros(mask.shape).masked_fill(~mask, x) for x in hidden)):
        got = grads_of(lambda *t: f(*t, attn_mask=form), q, k, v, dout)
        for n, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
            check(n, a, b)
    if call == "sageattn":
        turn = lambda t: t.transpose(1, 2)
        out, lse = f(turn(q), turn(k), turn(v), "NHD", attn_mask=mask, return_lse=True)
        assert torch.equal(turn(out), got[0])
        seen = torch.isfinite(want[1])
        assert torch.equal(torch.isfinite(lse), seen)
        torch.testing.assert_close(lse[seen].double(), want[1][seen], atol=LSE_ONE_KEY, rtol=0)


def test_masks_on_the_meta_device():
    q = torch.empty(2, 4, 60, 64, device="meta")
    mask = torch.ones(60, 60, dtype=torch.bool, device="meta")
    out, lse = sagebwd.sageattn(q, q, q, attn_mask=mask, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == q.shape[:3]


@pytest.mark.slow
def test_compiled_drop_ins():
    torch._dynamo.reset()
    stacked = torch.randn(2, 40, 3, 2, 64, requires_grad=True)
    call = lambda x: sagebwd.flash_attn_qkvpacked_func(x, causal=True, window_size=(8, 0))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(*((f(stacked), *torch.autograd.grad(f(stacked).sum(), stacked))
                      for f in (call, compiled))):  # fmt: skip
        assert torch.equal(a, b)
    q, caches = torch.randn(2, 1, 2, 64), [torch.randn(2, 50, 2, 64) for _ in range(2)]
    lengths = torch.tensor([3, 20], dtype=torch.int32)
    call = lambda *t: sagebwd.flash_attn_with_kvcache(*t, cache_seqlens=lengths, causal=True)
    copies = [c.clone() for c in caches]
    want = call(q, *copies, q, q)
    assert torch.equal(torch.compile(call, backend="aot_eager")(q, *caches, q, q), want)
    assert torch.equal(caches[0], copies[0]) and torch.equal(caches[1], copies[1])


def test_masks_of_other_lengths():
    """More keys than queries, as with a cache: padding at the left, causal at the bottom right."""
    q, k, v, dout = qkv(b=2, h=2, s=9, sk=40)
    mask = visible(9, 40, True).expand(2, 1, 9, 40).clone()
    mask[1, :, :, :11] = False
    want = exact_grads(q, k, v, dout, mask)
    got = grads_of(lambda *t: sagebwd.sageattn(*t, attn_mask=mask), q, k, v, dout)
    for n, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
        check(n, a, b)


def test_masks_that_kernels_do_not_know():
    q = torch.randn(2, 2, 8, 64)
    eye = torch.eye(8).bool()
    bias = torch.zeros(8, 8)
    bias[0, 1] = 0.5
    lowest = torch.zeros(8, 8)
    lowest[3] = torch.finfo(torch.float32).min
    heads = torch.ones(2, 2, 8, 8).bool()
    heads[:, 1, :, 5:] = False
    prefix = visible(8, 8, True)
    prefix[:, :3] = True
    for mask, error, words in [
        (~eye, NotImplementedError, "too many different sets of keys"),
        (prefix, NotImplementedError, "no causal mask or window within documents"),
        (bias, NotImplementedError, "bias"),
        (heads, NotImplementedError, "differs between heads"),
        (lowest, NotImplementedError, "use booleans or -inf"),
        (eye.int(), TypeError, "bool or a float"),
        (eye[:5], ValueError, "broadcasts to"),
        ([True], TypeError, "expected a tensor"),
        (eye.to("meta"), ValueError, "meta device"),
    ]:
        for call in (sagebwd.sageattn, sagebwd.scaled_dot_product_attention):
            with pytest.raises(error, match=words):
                call(q, q, q, attn_mask=mask)
    for call in (sagebwd.sageattn, sagebwd.scaled_dot_product_attention):
        with pytest.raises(ValueError, match="is_causal"):
            call(q, q, q, attn_mask=eye, is_causal=True)


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


HALF = torch.arange(30) < 15  # keys that are seen
FLASH_GIVEN = dict(softmax_scale=0.3, causal=True, window_size=(4, 2), recipe="paper")


def _flash_varlen(q, k, v, **kw):
    cu = torch.tensor([0, 12, 30], dtype=torch.int32)
    return sagebwd.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 18, 18, **kw)


def _sage_varlen(q, k, v, **kw):
    cu = torch.tensor([0, 12, 30], dtype=torch.int32)
    return sagebwd.sageattn_varlen(q[0], k[0], v[0], cu, cu, 18, 18, **kw)


@pytest.mark.parametrize(
    "call, arguments",
    [
        (sagebwd.flash_attn_func, FLASH_GIVEN),
        (_flash_varlen, FLASH_GIVEN),
        (
            sagebwd.sageattn,
            dict(sm_scale=0.3, is_causal=True, tensor_layout="NHD", smooth_k=False, attn_mask=HALF),
        ),
        (_sage_varlen, dict(sm_scale=0.3, is_causal=True, smooth_k=False)),
        (sagebwd.scaled_dot_product_attention, dict(scale=0.3, is_causal=True, attn_mask=HALF)),
    ],
    ids=["flash", "flash_varlen", "sage", "sage_varlen", "sdpa"],
)
def test_25_every_argument_counts(call, arguments):
    q, k, v = (torch.randn(1, 30, 30, 64) for _ in range(3))  # layouts differ in meaning, not shape
    k = k + 1
    plain = call(q, k, v)
    for name, value in arguments.items():
        value = value.to(q.device) if isinstance(value, torch.Tensor) else value
        assert not torch.equal(call(q, k, v, **{name: value}), plain), f"{name} was ignored"


def test_25_deterministic_counts(monkeypatch):
    """The flag changes no result on a CPU: it must reach the operator."""
    seen = []
    attend = sagebwd._ops.attention.attend

    def watched(*args, deterministic, **kw):
        seen.append(deterministic)
        return attend(*args, deterministic=deterministic, **kw)

    monkeypatch.setattr(sagebwd._ops.attention, "attend", watched)
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
        (lambda q: sagebwd.flash_attn_func(q, q, q, 0.1), "dropout_p=0.1 .*pass 0.0"),
        (lambda q: sagebwd.flash_attn_func(q, q, q, alibi_slopes=SLOPES), "alibi_slopes"),
        (
            lambda q: sagebwd.flash_attn_varlen_func(q[0], q[0], q[0], CU, CU, 8, 8, 0.1),
            "dropout_p",
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
