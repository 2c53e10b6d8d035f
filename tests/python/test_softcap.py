# SPDX-License-Identifier: Apache-2.0
"""softcap=: a scaled logit x becomes softcap * tanh(x / softcap). Against float64 and its gradients
by autograd, through every door of the package, and a tiny Gemma 2."""

import copy
import math

import pytest
import torch

import sagebwd
from reference import (
    HAS_ORACLE,
    LSE,
    ORACLE,
    as_coded,
    check,
    generator,
    grads_of,
    oracle,
    qkv,
    rel,
    visible,
)
from sagebwd import Recipe
from sagebwd._ops import attention as ops
from sagebwd.integrations import context_parallel
from sagebwd.recipe import MATMULS
from sagebwd.tools import capture

EXACT = Recipe(high_precision=tuple(MATMULS))


def truth(q, k, v, softcap, mask=None, sinks=None, scale=None):
    """(out, lse, largest logit) of [b, h, s, d] in float64, differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    x = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    y = softcap * torch.tanh(x / softcap)
    if mask is not None:
        y = y.masked_fill(~mask, -math.inf)
    top = y.amax((-1, -2))
    if sinks is not None:
        y = torch.cat((y, sinks.double()[None, :, None, None].expand(*y.shape[:3], 1)), -1)
    p = torch.softmax(y, -1)[..., : k.shape[2]]
    return p @ v, torch.logsumexp(y, -1), top


def truth_grads(q, k, v, dout, softcap, mask=None, dlse=None, scale=None):
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse, _ = truth(*leaves, softcap, mask, scale=scale)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse * dlse.double()).sum()
    return out.detach(), *torch.autograd.grad(loss, leaves)


def with_mean(h=4, hk=2, s=130, sk=150, offset=4.0, **rest):
    """q, k, v and dout; the keys have a large mean, which smoothing takes out of the logits."""
    q, k, v, dout = qkv(h=h, hk=hk, s=s, sk=sk, **rest)
    return q, k + offset * torch.randn(k.shape[-1], generator=generator(5)), v, dout


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0, 1e6])
@pytest.mark.parametrize("which", ["kernels", "oracle"])
def test_lifted_matmuls_agree_with_float64(softcap, which):
    if which == "oracle" and not HAS_ORACLE:
        pytest.skip("the oracle runs on the CPU")
    q, k, v, dout = with_mean()
    mask = visible(130, 150, True)
    dlse = torch.randn(1, 4, 130)
    run = lambda *t: sagebwd.attention(
        *t, layout="bhsd", causal=True, softcap=softcap, recipe=EXACT, return_lse=True
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    # Rows whose logits are all deep in saturation have gradients of nothing but rounding.
    with oracle() if which == "oracle" else torch.enable_grad():
        out, lse = run(*leaves)
        got = out, *torch.autograd.grad((out, lse), leaves, (dout, dlse))
    want = truth_grads(q, k, v, dout, softcap, mask, dlse)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        check(name, a, b, 2e-4)


@pytest.mark.parametrize("recipe", ["vectorwise", "paper"])
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_int8_is_as_accurate_as_without(recipe, softcap):
    q, k, v, dout = with_mean(offset=1.0)
    run = lambda *t: sagebwd.attention(*t, layout="bhsd", softcap=softcap, recipe=recipe)
    want = truth_grads(q, k, v, dout, softcap)
    for name, a, b in zip(("out", "dq", "dk", "dv"), grads_of(run, q, k, v, dout), want):
        check(name, a, b, 0.1 if recipe == "paper" else 0.06)


def test_lse_and_the_largest_logit_are_capped():
    q, k, v, _ = with_mean(offset=8.0)
    _, lse, top = sagebwd.attention(
        q, k, v, layout="bhsd", softcap=10.0, return_lse=True, return_max_logit=True
    )
    _, want_lse, want_top = truth(as_coded(q), k, v, 10.0)
    torch.testing.assert_close(lse.double(), want_lse, atol=LSE, rtol=0)
    torch.testing.assert_close(top.double(), want_top, atol=LSE, rtol=0)
    assert (top <= 10).all() and (top > 9).all()


def test_off_is_off():
    q, k, v, dout = with_mean()
    run = lambda **o: grads_of(lambda *t: sagebwd.attention(*t, layout="bhsd", **o), q, k, v, dout)
    for off in (None, 0, 0.0):
        assert all(map(torch.equal, run(), run(softcap=off)))
    # To the rounding of the codes.
    assert max(map(rel, run(softcap=1e8), run())) < 2e-3


def test_sinks_are_not_capped():
    q, k, v, dout = with_mean(offset=1.0)
    sinks = torch.tensor([3.0, -1.0, 9.0, 0.5]).requires_grad_()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = sagebwd.attention(
        *leaves, layout="bhsd", softcap=2.0, sinks=sinks, recipe=EXACT, return_lse=True
    )
    got = torch.autograd.grad(out, (*leaves, sinks), dout)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    want_out, want_lse, _ = truth(*wide[:3], 2.0, sinks=wide[3])
    want = torch.autograd.grad(want_out, wide, dout.double())
    check("out", out, want_out, 1e-4)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=0)
    for name, a, b in zip(("dq", "dk", "dv", "dsinks"), got, want):
        check(name, a, b, 2e-4)


def test_windows_and_scale():
    q, k, v, dout = with_mean(s=100, sk=100, offset=1.0)
    run = lambda *t: sagebwd.attention(
        *t, layout="bhsd", softcap=3.0, window_size=(20, 7), softmax_scale=0.3, recipe=EXACT
    )
    want = truth_grads(q, k, v, dout, 3.0, visible(100, 100, False, (20, 7)), scale=0.3)
    for name, a, b in zip(("out", "dq", "dk", "dv"), grads_of(run, q, k, v, dout), want):
        check(name, a, b, 2e-4)


def test_documents_and_lists_are_those_of_dense_calls():
    q, k, v, dout = (t[0].transpose(0, 1) for t in with_mean(s=128, sk=128))
    cu = torch.tensor([0, 50, 50, 128], dtype=torch.int32)
    run = lambda *t: sagebwd.attention_varlen(*t, cu, cu, causal=True, softcap=4.0)
    got = grads_of(run, q, k, v, dout)
    for begin, end in ((0, 50), (50, 128)):
        parts = [t[None, begin:end] for t in (q, k, v, dout)]
        want = grads_of(lambda *t: sagebwd.attention(*t, causal=True, softcap=4.0), *parts)
        for a, b in zip(got, want):
            assert rel(a[begin:end], b[0]) < 1e-5
    dense = [t[None] for t in (q, k, v, dout)]
    every = sagebwd.BlockLists(
        torch.arange(2, dtype=torch.int32).expand(1, 1, 1, 2), key_blocks=2, lead=0
    )
    lists = grads_of(lambda *t: sagebwd.attention(*t, softcap=4.0, blocks=every), *dense)
    want = grads_of(lambda *t: sagebwd.attention(*t, softcap=4.0), *dense)
    assert max(map(rel, lists, want)) < 0.02


@pytest.mark.parametrize("h, d", [(4, 64), (4, 20)])
def test_every_way_gives_the_same_bits(h, d, monkeypatch):
    q, k, v, dout = with_mean(h=h, d=d)
    run = lambda **o: grads_of(
        lambda *t: sagebwd.attention(*t, layout="bhsd", softcap=6.0, **o), q, k, v, dout
    )
    want = run()
    assert all(map(torch.equal, run(recipe=Recipe(save_codes=False)), want))
    monkeypatch.setattr(ops, "_attend", None)
    assert all(map(torch.equal, run(), want))


@pytest.mark.skipif(not HAS_ORACLE, reason="the oracle runs on the CPU")
def test_agrees_with_the_oracle():
    q, k, v, dout = with_mean()
    run = lambda: sagebwd.attention(q, k, v, layout="bhsd", softcap=6.0, return_lse=True)
    with oracle():
        want = run()
    got = run()
    assert rel(got[0], want[0]) < 2e-3
    torch.testing.assert_close(got[1], want[1], atol=ORACLE, rtol=0)


@pytest.mark.parametrize(
    "value, error",
    [
        (-1.0, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (1e-30, ValueError),
        (1e30, ValueError),
        (True, TypeError),
        ("5", TypeError),
    ],
)
def test_25_caps_that_make_no_sense(value, error):
    q = torch.randn(1, 8, 2, 64)
    calls = [
        lambda: sagebwd.attention(q, q, q, softcap=value),
        lambda: sagebwd.flash_attn_func(q, q, q, softcap=value),
        lambda: sagebwd.flash_attn_with_kvcache(q, q, q, softcap=value),
    ]
    for call in calls:
        with pytest.raises(error, match="softcap"):
            call()
    assert not sagebwd.is_supported(q, q, q, softcap=value)
    assert sagebwd.is_supported(q, q, q, softcap=5.0)


def test_25_the_operator_refuses_it_too():
    q = torch.randn(1, 2, 8, 64)
    with pytest.raises(ValueError, match="softcap: expected 0"):
        ops.forward(q, q, q, ops.Options(softcap=-1.0))


def test_drop_ins():
    q, k, v, dout = (t.transpose(1, 2) for t in with_mean())
    want = grads_of(lambda *t: sagebwd.attention(*t, causal=True, softcap=7.0), q, k, v, dout)
    flash = lambda *t: sagebwd.flash_attn_func(*t, causal=True, softcap=7.0)
    assert all(map(torch.equal, grads_of(flash, q, k, v, dout), want))
    cached = sagebwd.flash_attn_with_kvcache(q, k, v, causal=True, softcap=7.0)
    assert torch.equal(cached, want[0])
    lengths = torch.tensor([150], dtype=torch.int32)
    ragged = sagebwd.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=True, softcap=7.0
    )
    assert rel(ragged, want[0]) < 1e-5
    kv = torch.stack((k, v), 2)
    stacked = sagebwd.flash_attn_kvpacked_func(q, kv, causal=True, softcap=7.0)
    assert torch.equal(stacked, want[0])
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (130, 150))
    packed = sagebwd.flash_attn_varlen_func(
        q[0], k[0], v[0], cu_q, cu_k, 130, 150, causal=True, softcap=7.0
    )
    assert torch.equal(packed[None], want[0])


def test_compiled_and_meta():
    q, k, v, dout = with_mean()
    run = lambda *t: sagebwd.attention(*t, layout="bhsd", softcap=6.0)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, grads_of(compiled, q, k, v, dout), grads_of(run, q, k, v, dout)))
    shadow = q.to("meta")
    assert run(shadow, k.to("meta"), v.to("meta")).shape == q.shape


def test_rings_and_captures():
    options = context_parallel._options(True, None, "vectorwise", "int8", softcap=5.0)
    assert options.softcap == 5.0
    q, k, v, dout = with_mean()
    with capture.Capture() as seen:
        grads_of(lambda *t: sagebwd.attention(*t, layout="bhsd", softcap=6.0), q, k, v, dout)
    assert [layer.unsupported for layer in seen.layers] == ["soft capping of logits"]


def test_parts_of_the_keys_add_up():
    """What a ring does: the gradients of two halves of the keys, with LSE and O of all."""
    q, k, v, dout = with_mean(h=2, hk=2)
    options = ops.Options(softcap=6.0, recipe=EXACT.text())
    out, lse, _ = ops.forward(q, k, v, options)
    want = truth_grads(q, k, v, dout, 6.0)
    half = lambda t, i: t[:, :, 75 * i : 75 * (i + 1)].contiguous()
    parts = [
        ops.backward(dout, q, half(k, i), half(v, i), out, lse, None, options, partial_kv=True)
        for i in range(2)
    ]
    check("dq", parts[0][0] + parts[1][0], want[1], 2e-4)
    check("dk", torch.cat([p[1] for p in parts], 2), want[2], 2e-4)
    check("dv", torch.cat([p[2] for p in parts], 2), want[3], 2e-4)


# --- Gemma 2 --------------------------------------------------------------------------------------


def test_gemma_2_tracks_eager():
    transformers = pytest.importorskip("transformers")
    from sagebwd.integrations import transformers as sage

    torch.manual_seed(1)
    config = transformers.Gemma2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        sliding_window=16,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=4,
        initializer_range=0.2,  # logits that a cap of 2 changes
        attention_dropout=0.0,
    )
    eager = transformers.Gemma2ForCausalLM(config)
    eager.set_attn_implementation("eager")
    ids = torch.randint(0, 97, (2, 48), generator=generator(3))

    def gradients(model):
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads = {n: p.grad.detach().flatten() for n, p in model.named_parameters()}
        return loss.item(), torch.cat([g for n, g in grads.items() if "self_attn" in n])

    uncapped = copy.deepcopy(eager)
    for layer in uncapped.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    ours = {}
    for name, recipe in (("sagebwd", "vectorwise"), ("sagebwd_exact", EXACT)):
        model = copy.deepcopy(eager)
        sage.register(name, recipe=recipe)
        try:
            model.set_attn_implementation(name)
            ours[name] = gradients(model)
        finally:
            sage.unregister(name)
    want_loss, want = gradients(eager)
    _, other = gradients(uncapped)
    assert rel(other, want) > 0.3, "without the cap it is another model"
    for name, gate in (("sagebwd", 0.1), ("sagebwd_exact", 1e-3)):
        loss, grads = ours[name]
        assert abs(loss - want_loss) < 0.1 * gate * want_loss
        assert rel(grads, want) < gate, name
