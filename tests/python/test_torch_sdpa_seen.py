# SPDX-License-Identifier: Apache-2.0
"""No call bypasses the hook for F.scaled_dot_product_attention silently: each one runs here, is
refused with a remedy, or is reported."""

import contextlib
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import sagebwd
from reference import check, exact_grads, grads_of, qkv, rel, visible
from sagebwd.integrations import torch_sdpa

pytestmark = pytest.mark.cpu_only  # float32, and modules made on the CPU


@pytest.fixture(autouse=True)
def _restore():
    yield
    torch_sdpa.restore()
    torch._dynamo.reset()


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


@contextlib.contextmanager
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_docstring_needs_no_import(monkeypatch):
    monkeypatch.delattr(sagebwd.integrations, "torch_sdpa")  # as if nobody had imported it
    assert sagebwd.integrations.torch_sdpa is torch_sdpa
    assert set(sagebwd.integrations.__all__) <= set(dir(sagebwd.integrations))
    with pytest.raises(AttributeError, match="no_such"):
        sagebwd.integrations.no_such  # noqa: B018


# --- nn.Transformer -------------------------------------------------------------------------------


def encoder(dropout=0.1, attention_dropout=None, **options):
    layer = torch.nn.TransformerEncoderLayer(
        64, 2, 96, dropout=dropout, batch_first=True, **options
    )
    if attention_dropout is not None:
        layer.self_attn.dropout = attention_dropout
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)


def test_encoder_with_dropout_is_refused_with_a_remedy():
    model, x = encoder(), torch.randn(2, 12, 64)
    with torch_sdpa.enabled():
        with pytest.raises(NotImplementedError, match=r"dropout_p=0.1.*self_attn.dropout = 0.0"):
            model(x)
    with pytest.warns(UserWarning, match=r"self_attn.dropout = 0.0") as caught:
        with torch_sdpa.enabled(fallback=True) as seen:
            model(x)
    assert len(caught) == 1, "once per reason"
    assert seen.calls == 0 and sum(seen.passed_on.values()) == 2
    with silent(), torch_sdpa.enabled() as seen:
        encoder(attention_dropout=0.0)(x).sum().backward()
    assert seen.calls == 2 and not seen.passed_on


def test_eval_runs_here_and_the_fast_path_comes_back():
    model, x = encoder().eval(), torch.randn(2, 12, 64)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        want = model(x)
        with silent(), torch_sdpa.enabled() as seen:
            got = model(x)
        assert torch.equal(model(x), want)
    assert seen.calls == 2
    assert 0 < rel(got, want) < 0.03
    assert torch.backends.mha.get_fastpath_enabled()


def test_key_padding_and_causal_through_the_encoder():
    torch.manual_seed(1)
    model, x = encoder(dropout=0.0), torch.randn(2, 12, 64)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 7:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(12)
    for options in (
        dict(src_key_padding_mask=padding),
        dict(mask=causal),
        dict(mask=causal, src_key_padding_mask=padding.float().masked_fill(padding, -torch.inf)),
    ):
        results = []
        for scope in (contextlib.nullcontext(), torch_sdpa.enabled()):
            model.zero_grad()
            with scope as seen:
                out = model(x, **options)
                out[~padding].square().sum().backward()
            results.append((out[~padding], model.layers[0].self_attn.in_proj_weight.grad.clone()))
        assert seen.calls == 2 and not seen.passed_on
        for got, want in zip(results[1], results[0]):
            assert 0 < rel(got, want) < 0.05


def test_need_weights():
    mha, x = torch.nn.MultiheadAttention(64, 2, batch_first=True), torch.randn(2, 12, 64)
    with torch_sdpa.enabled():
        with pytest.raises(NotImplementedError, match="need_weights=False"):
            mha(x, x, x)
    originals = F.multi_head_attention_forward, F.scaled_dot_product_attention
    with torch_sdpa.enabled(fallback=True) as seen:
        with pytest.warns(UserWarning, match="need_weights=False"):
            mha(x, x, x)
        with silent():
            mha(x, x, x, need_weights=False)
    assert seen.calls == 1 and sum(seen.passed_on.values()) == 1
    assert originals == (F.multi_head_attention_forward, F.scaled_dot_product_attention)


# --- the report -----------------------------------------------------------------------------------


def test_a_block_without_calls_says_so():
    with pytest.warns(UserWarning, match="saw no attention call.*attn_implementation='sdpa'"):
        with torch_sdpa.enabled():
            torch.softmax(torch.randn(3, 3), -1)
    with silent(), pytest.raises(KeyError):  # an error is enough of a message
        with torch_sdpa.enabled():
            raise KeyError


def test_excluded_flash_attention_is_left_alone_and_said():
    q, k, v, _ = qkv(s=40)
    math = torch.nn.attention.SDPBackend.MATH
    with torch.nn.attention.sdpa_kernel(math):
        want = sdpa(q, k, v)
        with pytest.warns(UserWarning, match="allow SDPBackend.FLASH_ATTENTION"):
            with torch_sdpa.enabled() as seen:
                assert torch.equal(sdpa(q, k, v), want)
    assert seen.calls == 0 and len(seen.passed_on) == 1


def test_context_parallel_without_a_ring_says_so():
    from sagebwd.integrations import context_parallel

    with pytest.warns(UserWarning, match="context_parallel saw no attention call.*enter that"):
        with context_parallel.enabled() as seen:
            sdpa(*qkv(s=40)[:3])
    assert seen.calls == 0


def test_other_devices_are_counted():
    q, k, v, _ = qkv(s=40)
    want = sdpa(q, k, v)
    with silent(), torch_sdpa.enabled(devices=("cuda",)) as seen:
        assert torch.equal(sdpa(q, k, v), want)
        torch.nn.MultiheadAttention(64, 2)(q[0], k[0], v[0])
    assert seen.calls == 0 and sum(seen.passed_on.values()) == 2


# --- forms of calls -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [
        dict(q=(2, 3, 40, 20), k=(2, 3, 40, 20), v=(2, 3, 40, 20)),
        dict(q=(1, 2, 40, 64), k=(1, 2, 50, 64), v=(1, 2, 50, 32)),
        dict(q=(1, 2, 40, 16), k=(1, 2, 50, 16), v=(1, 2, 50, 36)),
        dict(q=(3, 40, 32), k=(3, 50, 32), v=(3, 50, 32)),
        dict(q=(40, 32), k=(50, 32), v=(50, 32)),
        dict(q=(2, 4, 40, 32), k=(2, 1, 50, 32), v=(2, 1, 50, 32)),
        dict(q=(2, 4, 40, 32), k=(1, 4, 50, 32), v=(1, 4, 50, 32)),
        dict(q=(2, 2, 2, 40, 32), k=(2, 2, 2, 50, 32), v=(2, 2, 2, 50, 32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["eager", "causal", "padding"])
def test_shapes_that_pytorch_routes_elsewhere(shapes, mode):
    q, k, v = (torch.randn(shapes[name]) for name in "qkv")
    options = dict(is_causal=mode == "causal")
    if mode == "padding":
        options["attn_mask"] = (torch.arange(k.shape[-2]) < 30)[None]
    want_out = sdpa(q, k, v, **options)
    dout = torch.randn_like(want_out)
    want = grads_of(lambda *t: sdpa(*t, **options), q, k, v, dout)
    with silent(), torch_sdpa.enabled() as seen:
        got = grads_of(lambda *t: sdpa(*t, **options), q, k, v, dout)
    assert seen.calls == 1
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        assert a.shape == b.shape
        check(name, a, b)
        assert not torch.equal(a, b)


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((6, 40, 32), (2, 50, 32), (2, 50, 32)),
        ((2, 2, 6, 40, 32), (2, 2, 3, 50, 32), (2, 2, 3, 50, 32)),
        ((2, 6, 40, 32), (1, 3, 50, 32), (1, 3, 50, 32)),
        ((2, 6, 40, 32), (2, 3, 50, 32), (2, 2, 50, 32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "padding"])
def test_grouped_queries_of_other_shapes(q, k, v, masked):
    q, k, v = (torch.randn(shape) for shape in (q, k, v))
    options = dict(enable_gqa=True)
    if masked:
        options["attn_mask"] = (torch.arange(50) < 30).expand(*q.shape[:-3], 1, 40, 50)
    want = grads_of(lambda *t: sdpa(*t, **options), q, k, v, dout := torch.randn_like(q))
    with silent(), torch_sdpa.enabled() as seen:
        got = grads_of(lambda *t: sdpa(*t, **options), q, k, v, dout)
    assert seen.calls == 1
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        check(name, a, b)


@pytest.mark.parametrize(
    "shape, width", [((0, 2, 5, 8), 8), ((2, 0, 5, 8), 8), ((2, 2, 0, 8), 8), ((2, 2, 5, 8), 0)],
    ids=str,
)  # fmt: skip
def test_calls_without_results(shape, width):
    q, v = torch.randn(shape), torch.randn(*shape[:-1], width)
    with silent(), torch_sdpa.enabled():
        assert sdpa(q, q, v).shape == v.shape


def test_a_scale_of_zero_is_refused():
    q = torch.randn(1, 2, 40, 32)
    with torch_sdpa.enabled():
        with pytest.raises(NotImplementedError, match="scale=0.0"):
            sdpa(q, q, q, scale=0.0)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("sq, sk", [(40, 40), (40, 70)])
@pytest.mark.parametrize("kind", ["causal_lower_right", "causal_upper_left"])
def test_masks_that_are_classes(kind, sq, sk, fallback):
    """Nobody has written the numbers of a CausalBias."""
    import torch.nn.attention.bias as bias

    q, k, v = torch.randn(1, 2, sq, 32), torch.randn(1, 2, sk, 32), torch.randn(1, 2, sk, 32)
    mask = lambda: getattr(bias, kind)(sq, sk)
    want = sdpa(q, k, v, attn_mask=mask())
    with silent(), torch_sdpa.enabled(fallback=fallback) as seen:
        check("out", F.scaled_dot_product_attention(q, k, v, attn_mask=mask()), want)
        # By another name, as code has it that imported the function before.
        check("out", torch_sdpa._original_sdpa(q, k, v, attn_mask=mask()), want)
    assert seen.calls == 2
    for call in (sagebwd.scaled_dot_product_attention, sagebwd.sageattn):
        check("out", call(q, k, v, attn_mask=mask()), want)


def test_modes_that_watch_functions_see_the_call():
    """diffusers skips attention so (perturbed attention guidance)."""

    class Skip(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.scaled_dot_product_attention:
                return args[2]
            return func(*args, **(kwargs or {}))

    q, k, v = (torch.randn(1, 2, 40, 32) for _ in range(3))
    want = sdpa(q, k, v)
    with torch_sdpa.enabled() as seen:
        with Skip():
            assert F.scaled_dot_product_attention(q, k, v) is v
        with torch.device("cpu"):  # a mode, too
            check("out", F.scaled_dot_product_attention(q, k, v), want)
        assert F.scaled_dot_product_attention is torch_sdpa._scaled_dot_product_attention
    assert seen.calls == 1
    assert F.scaled_dot_product_attention is torch_sdpa._original_sdpa


def padding_mask():
    """Keys 10 and on of the second entry are hidden."""
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1, ..., 10:] = False
    return mask


def additive(mask, hidden):
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


def scattered():
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[0, ..., ::3] = False
    return mask


def pairs():
    """Padding of queries and of keys."""
    real = torch.arange(40) < torch.tensor([[40], [25]])
    return (real[:, None, :] & real[:, :, None])[:, None]


def blocks():
    """Three documents."""
    document = torch.tensor([0] * 9 + [1] * 20 + [2] * 11)
    return document[:, None] == document


def never_empty():
    """Padding of queries and keys, but every query sees the first key."""
    mask = pairs()
    mask[..., 0] = True
    return mask


MASKS = {
    "blocks": blocks(),
    "blocks with padding": blocks() & padding_mask(),
    "never empty": never_empty(),
    "key padding": padding_mask(),
    "expanded": padding_mask().expand(2, 2, 40, 40),
    "copied to heads": padding_mask().expand(2, 2, 40, 40).contiguous(),
    "-inf": additive(padding_mask(), -torch.inf),
    "-10000": additive(padding_mask(), -10000.0),
    "least float": additive(padding_mask(), torch.finfo(torch.float32).min),
    "any keys": scattered(),
    "pairs": pairs(),
    "one entry hides all": padding_mask() & torch.tensor([True, False])[:, None, None, None],
    "causal": visible(40, 40, True),
    "causal, right padding": visible(40, 40, True) & padding_mask(),
    "causal, left padding": visible(40, 40, True) & padding_mask().flip(-1),
    "window": visible(40, 40, True, (7, 0)),
    "window, left padding": visible(40, 40, False, (7, 2)) & padding_mask().flip(-1),
    "causal blocks": visible(40, 40, True) & blocks(),
    "nothing hidden": torch.zeros(40, 40),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_masks(name, compiled):
    q, k, v, dout = qkv(b=2, s=40)
    mask = MASKS[name]
    seen_keys = (mask if mask.dtype == torch.bool else mask == 0).expand(2, 2, 40, 40)
    want = exact_grads(q, k, v, dout, seen_keys)
    layer = lambda *t: sdpa(*t, attn_mask=mask)
    if compiled:
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with silent(), torch_sdpa.enabled() as seen:
        got = grads_of(layer, q, k, v, dout)
    assert seen.calls == 1
    for result, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
        check(result, a, b)


@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.randn(40, 40), "it adds a bias"),
        (additive(padding_mask(), -100.0), "it adds a bias"),
        (torch.randn(1, 2, 1, 40) > 0, "differs between heads"),
        (torch.rand(40, 40) > 0.5, "attn_mask of shape"),
        (torch.zeros(1, 1, 40, 40, requires_grad=True), "learned bias"),
        (torch.full((1, 1, 1, 40), -10000.0), "finite number"),
        (visible(40, 40, True) & scattered(), "attn_mask of shape"),
    ],
)
def test_masks_that_are_more_than_padding_are_refused(mask, words):
    q, k, v, _ = qkv(b=2, s=40)
    with torch_sdpa.enabled():
        with pytest.raises(NotImplementedError, match=f"{words}.*; .*fallback=True"):
            sdpa(q, k, v, attn_mask=mask)
    with pytest.warns(UserWarning, match=words):
        with torch_sdpa.enabled(fallback=True) as seen:
            got = sdpa(q, k, v, attn_mask=mask)
    assert torch.equal(got, sdpa(q, k, v, attn_mask=mask)) and seen.calls == 0


def test_a_mask_beside_is_causal_is_refused():
    q, k, v, _ = qkv(b=2, s=40)
    with torch_sdpa.enabled():
        for call in (sdpa, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu):
            with pytest.raises(ValueError, match="attn_mask, is_causal: expected one of them"):
                call(q, k, v, attn_mask=padding_mask(), is_causal=True)


@pytest.mark.parametrize("sq, sk", [(30, 50), (50, 30)])
def test_causal_with_unequal_lengths_starts_at_the_top_left(sq, sk):
    q, k, v, dout = qkv(s=sq, sk=sk)
    want = exact_grads(q, k, v, dout, visible(sq, sk, True, align="top_left"))
    with torch_sdpa.enabled():
        got = grads_of(lambda *t: sdpa(*t, is_causal=True), q, k, v, dout)
        last = visible(sq, sk, True, align="bottom_right")
        at_the_end = grads_of(lambda *t: sdpa(*t, attn_mask=last), q, k, v, dout)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
        check(name, a, b)
    want = exact_grads(q, k, v, dout, last)
    for name, a, b in zip(("out", "dq", "dk", "dv"), at_the_end, (want[0], *want[2:])):
        check(name, a, b)


def test_autocast():
    q, k, v, _ = qkv(s=40)
    with torch.autocast("cpu", torch.bfloat16), torch_sdpa.enabled() as seen:
        out = sdpa(q, k, v)
    assert out.dtype == torch.bfloat16 and seen.calls == 1
    half = [t.bfloat16() for t in (q, k, v)]
    assert torch.equal(out, sagebwd.scaled_dot_product_attention(*half))


def test_transforms_are_refused():
    q, k, v, _ = qkv(b=2, s=24)
    stacked = [torch.stack([t, t]) for t in (q, k, v)]
    with torch_sdpa.enabled(fallback=True) as seen:
        with pytest.raises(NotImplementedError, match="fold the mapped dimension"):
            torch.vmap(sdpa)(*stacked)
        with pytest.raises(NotImplementedError, match="fold the mapped dimension"):
            torch.vmap(lambda *t: sdpa(*t, dropout_p=0.5), randomness="different")(*stacked)
        with pytest.raises(NotImplementedError, match="torch.autograd.grad"):
            torch.func.grad(lambda q: sdpa(q, k, v).sum())(q)
    assert seen.calls == 0


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused(layout):
    rows = [torch.randn(n, 2, 32) for n in (5, 7)]
    if layout == torch.jagged:
        nested = torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor([r.transpose(0, 1) for r in rows])
    want = sdpa(nested, nested, nested)
    with torch_sdpa.enabled():
        with pytest.raises(NotImplementedError, match="attention_varlen"):
            sdpa(nested, nested, nested)
    with pytest.warns(UserWarning, match="attention_varlen"):
        with torch_sdpa.enabled(fallback=True) as seen:
            got = sdpa(nested, nested, nested)
    assert seen.calls == 0
    for a, b in zip(got.unbind(), want.unbind()):
        assert torch.equal(a, b)


def test_dispatch_modes_see_pytorchs_operator():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v, dout = qkv(s=40)
    want = grads_of(sagebwd.scaled_dot_product_attention, q, k, v, dout)
    with FlopCounterMode(display=False) as plain:
        grads_of(sdpa, q, k, v, dout)
    with torch_sdpa.enabled() as seen, FlopCounterMode(display=False) as counter:
        got = grads_of(sdpa, q, k, v, dout)
    assert seen.calls == 1 and counter.get_total_flops() == plain.get_total_flops()
    for a, b in zip(got, want):
        assert torch.equal(a, b)


# --- scope ----------------------------------------------------------------------------------------


def test_the_backward_may_run_outside():
    q, k, v, dout = qkv(s=60)
    with torch_sdpa.enabled():
        want = grads_of(sdpa, q, k, v, dout)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = sdpa(*leaves)
    for a, b in zip(torch.autograd.grad(out, leaves, dout), want[1:]):
        assert torch.equal(a, b)


def test_nested_blocks():
    q, k, v, _ = qkv(s=200)
    plain = sdpa(q, k, v)
    with torch_sdpa.enabled() as outer:
        first = sdpa(q, k, v)
        with torch_sdpa.enabled(recipe="paper") as inner:
            paper = sdpa(q, k, v)
        assert torch.equal(sdpa(q, k, v), first), "the outer block goes on"
    assert (outer.calls, inner.calls) == (2, 1)
    assert not torch.equal(paper, first)
    assert torch.equal(sdpa(q, k, v), plain)


def test_blocks_that_overlap_in_threads():
    q, k, v, _ = qkv(s=60)
    plain, ours = sdpa(q, k, v), sagebwd.scaled_dot_product_attention(q, k, v)
    entered, leave = threading.Event(), threading.Event()
    results = []

    def work():
        with torch_sdpa.enabled():
            entered.set()
            leave.wait(10)
            results.append(sdpa(q, k, v))

    thread = threading.Thread(target=work)
    with torch_sdpa.enabled(recipe="paper") as seen:
        sdpa(q, k, v)
        thread.start()
        entered.wait(10)
    leave.set()
    thread.join()
    assert seen.calls == 1
    assert torch.equal(results[0], ours), "the block that is left does not end the other"
    assert torch.equal(sdpa(q, k, v), plain)


def test_calls_of_other_threads_are_seen():
    q, k, v, _ = qkv(s=60)
    with torch_sdpa.enabled() as seen:
        threads = [threading.Thread(target=sdpa, args=(q, k, v)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen.calls == 4


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["d64", "d20", "without heads"])
def test_compiled_code_follows_the_hook_wherever_it_was_compiled(shape):
    q, k, v, dout = qkv(s=40, d=20 if shape == "d20" else 64)
    if shape == "without heads":
        q, k, v, dout = q[0], k[0], v[0], dout[0]
    layer = lambda q, k, v: sdpa(q * 1.0, k, v, is_causal=True)
    eager = grads_of(layer, q, k, v, dout)
    with torch_sdpa.enabled():
        ours = grads_of(layer, q, k, v, dout)
    for inside_first in (True, False):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for inside in (inside_first, not inside_first, inside_first):
            with torch_sdpa.enabled() if inside else contextlib.nullcontext() as seen:
                got = grads_of(compiled, q, k, v, dout)
            for a, b, other in zip(got, ours if inside else eager, eager if inside else ours):
                assert rel(a, b) < 1e-5 < rel(a, other)
            if inside:
                assert seen.calls == 1


@pytest.mark.slow
def test_compiled_code_that_cannot_run_here_is_refused():
    q, k, v, _ = qkv(s=40)
    mha, x = torch.nn.MultiheadAttention(64, 2, batch_first=True), torch.randn(2, 12, 64)
    for function, args, words in (
        (lambda *t: sdpa(*t, dropout_p=0.1), (q, k, v), "dropout_p=0.1"),
        (lambda *t: sdpa(*t), tuple(t.double() for t in (q, k, v)), "float64"),
        (lambda x: mha(x, x, x)[0], (x,), "need_weights=False"),
    ):
        torch._dynamo.reset()
        with torch_sdpa.enabled():
            with pytest.raises(Exception, match=words):
                torch.compile(function, backend="aot_eager")(*args)
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match=words):
            with torch_sdpa.enabled(fallback=True) as seen:
                torch.compile(function, backend="aot_eager")(*args)
        assert seen.calls == 0


def test_one_graph_for_inside_and_outside():
    """A name imported from torch.nn.functional: compiled code does not see that it is replaced."""
    q, k, v, _ = qkv(s=40)
    sdpa = torch._C._nn.scaled_dot_product_attention
    plain, ours = sdpa(q, k, v), sagebwd.scaled_dot_product_attention(q, k, v)
    compiled = torch.compile(lambda *t: sdpa(*t), backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(q, k, v), plain)
    with torch_sdpa.enabled() as seen:
        assert torch.equal(compiled(q, k, v), ours)
    assert seen.calls == 1
    assert torch.equal(compiled(q, k, v), plain)
    narrow = [t[..., :20] for t in (q, k, v)]
    compiled(*narrow)
    with torch_sdpa.enabled():
        assert torch.equal(compiled(*narrow), sagebwd.scaled_dot_product_attention(*narrow))


def test_dropout_compiled_outside_is_refused_inside():
    q, k, v, _ = qkv(s=40)
    compiled = torch.compile(lambda *t: sdpa(*t, dropout_p=0.1), backend="aot_eager")
    compiled(q, k, v)
    with torch_sdpa.enabled():
        with pytest.raises(NotImplementedError, match="dropout_p"):
            compiled(q, k, v)
