# SPDX-License-Identifier: Apache-2.0
"""The hook for diffusers: small models of every family, masks, refusals, scope."""

import contextlib
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

diffusers = pytest.importorskip("diffusers")

import diffusers_families as families  # noqa: E402
from diffusers.models.attention_dispatch import (  # noqa: E402
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)

from reference import exact_grads, grads_of, qkv, rel  # noqa: E402
from sagebwd.integrations import diffusers as sage  # noqa: E402


@pytest.fixture(autouse=True)
def _disabled():
    yield
    sage.disable()
    sage._traced = False
    torch._dynamo.reset()


# --- models ---------------------------------------------------------------------------------------

# Calls that stay out of INT8, and a word of the reason. All other calls of all families run here.
LEFT_OUT = {
    "HunyuanDiT": (1, "torch_sdpa.enabled"),
    "unCLIP prior": (2, "no causal mask or window within documents"),
    "Autoencoder (KL)": (2, "head dim 320"),
}


ON_GPU = ("DiT", "Flux", "PixArt", "Stable Diffusion 3")  # one of each way to attention, masks


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ON_GPU else pytest.mark.cpu_only)
        for family in families.FAMILIES
    ],
)
def test_families(family):
    left_out, words = LEFT_OUT.get(family, (0, None))
    expected = pytest.warns(UserWarning, match=words) if left_out else contextlib.nullcontext()
    with expected:
        seen, calls, output, gradients = families.compare(family, fallback=bool(left_out))
    assert seen.calls == calls - left_out
    assert sum(seen.passed_on.values()) == left_out
    if seen.calls:
        assert 0 < output < 0.03 and 0 < gradients < 0.06
    else:
        assert output == gradients == 0


@pytest.mark.parametrize("family", ["Flux", "Stable Diffusion 3"])
def test_a_model_trains(family):
    model, inputs = families.build(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with sage.enabled():
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**inputs).sample.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("family", ["Flux", "DiT", "PixArt"])
def test_the_backward_may_run_outside(family):
    model, inputs = families.build(family)
    with sage.enabled():
        _, want = families.step(model, inputs)
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(**inputs, return_dict=False)[0].square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, want[name]), name


def backend_layer():
    q, k, v, _ = qkv(s=24)
    return lambda: call(q * 1.0, k, v)


def processor_layer():
    from diffusers.models.attention_processor import Attention

    layer, x = Attention(query_dim=32, heads=2, dim_head=16), torch.randn(2, 24, 32)
    return lambda: layer(x)


def masked_processor_layer():
    from diffusers.models.attention_processor import Attention

    layer, x = Attention(query_dim=32, heads=2, dim_head=16), torch.randn(2, 24, 32)
    mask = torch.zeros(2, 1, 24)
    mask[1, :, 10:] = -10000.0
    return lambda: layer(x, attention_mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("make", [backend_layer, processor_layer, masked_processor_layer])
def test_compiled_code_follows_the_hook(make):
    layer = make()
    compiled = torch.compile(layer, backend="eager", fullgraph="masked" not in make.__name__)
    want = {None: layer()}
    for recipe in ("vectorwise", "paper"):
        with sage.enabled(recipe=recipe):
            want[recipe] = layer()
    assert all(rel(want["paper"], want[other]) > 1e-5 for other in (None, "vectorwise"))
    for recipe in (None, "vectorwise", "paper", None, "vectorwise"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="sagebwd")
            with sage.enabled(recipe=recipe) if recipe else contextlib.nullcontext() as seen:
                got = compiled()
        assert rel(got, want[recipe]) < 1e-6, recipe
        if recipe == "paper":
            assert seen.calls >= 1, "counted when traced"


# --- calls ----------------------------------------------------------------------------------------


def call(q, k, v, **options):
    """dispatch_attention_fn on [b, h, s, d] tensors."""
    return dispatch_attention_fn(*(t.transpose(1, 2) for t in (q, k, v)), **options).transpose(1, 2)


@pytest.mark.parametrize("shape", ["bk", "b11k"])
def test_key_padding(shape):
    q, k, v, dout = qkv(b=2, s=30, sk=50)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1, 20:] = False
    want = exact_grads(q, k, v, dout, mask[:, None, None, :].expand(2, 2, 30, 50))
    given = mask if shape == "bk" else mask[:, None, None, :]
    with sage.enabled():
        got = grads_of(lambda *t: call(*t, attn_mask=given), q, k, v, dout)
    for a, b in zip(got, (want[0], *want[2:])):
        assert rel(a, b) < 0.06


def test_two_dimensions_of_a_mask_are_read_as_diffusers_does():
    q, k, v, _ = qkv(b=3, s=24)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    padding = torch.arange(24) < torch.tensor([[24], [9], [17]])
    for mask in (causal, padding):
        want = call(q, k, v, attn_mask=mask)
        with sage.enabled():
            assert 0 < rel(call(q, k, v, attn_mask=mask), want) < 0.05


def test_autocast_and_lse():
    q, k, v, _ = qkv(s=24)
    with torch.autocast(q.device.type, torch.bfloat16), sage.enabled():
        assert call(q, k, v).dtype == torch.bfloat16
        turned = [t.transpose(1, 2) for t in (q, k, v)]
        _, lse = dispatch_attention_fn(*turned, attention_kwargs=dict(return_lse=True))
    assert lse.shape == (1, 24, 2)


def test_processors_that_write_softmax_out_are_refused():
    from diffusers.models.attention_processor import Attention, AttnProcessor

    model, inputs = families.build("UNet (Stable Diffusion 1, 2, XL)")
    model.set_attn_processor(AttnProcessor())
    before = Attention.get_attention_scores
    with sage.enabled():
        with pytest.raises(NotImplementedError, match="AttnProcessor2_0"):
            model(**inputs)
    with pytest.warns(UserWarning, match="AttnProcessor2_0"):
        with sage.enabled(fallback=True) as seen:
            model(**inputs)
    assert seen.calls == 0 and sum(seen.passed_on.values()) == 8
    assert Attention.get_attention_scores is before


@pytest.mark.parametrize("family", ["DiT", "Qwen-Image"])
def test_layers_that_skip_attention_scores(family):
    """Perturbed attention guidance puts v in the place of attention, by a mode that watches
    F.scaled_dot_product_attention."""

    class Skip(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.scaled_dot_product_attention:
                kwargs = kwargs or {}
                return kwargs["value"] if "value" in kwargs else args[2]
            return func(*args, **(kwargs or {}))

    model, inputs = families.build(family)
    run = lambda: families.step(model, inputs)[0]
    with Skip():
        want = run()
    plain = run()
    assert rel(plain, want) > 0.01
    with pytest.warns(UserWarning, match="Skip watches"):
        with sage.enabled() as seen, Skip():
            assert torch.equal(run(), want)
    assert seen.calls == 0
    with torch.device("cpu"), sage.enabled() as seen:  # a mode as well, which only names a device
        run()
    assert seen.calls > 0


def test_a_block_without_calls_says_so():
    with pytest.warns(UserWarning, match="saw no attention call.*set_attention_backend"):
        with sage.enabled():
            pass
    model, inputs = families.build("Flux")
    before = _AttentionBackendRegistry._active_backend
    model.set_attention_backend("_native_math")  # of the process, too
    with pytest.warns(UserWarning, match="saw no attention call.*set_attention_backend"):
        with sage.enabled():
            model(**inputs)
    _AttentionBackendRegistry.set_active_backend(before)


def test_modules_imported_in_the_block_are_named():
    from diffusers.models import attention_processor

    with pytest.warns(UserWarning, match="attention_processor was imported inside the block"):
        with sage.enabled():
            attention_processor.F = F  # as an import would leave it
    assert attention_processor.F is F


# --- scope ----------------------------------------------------------------------------------------


def test_attention_outside_of_diffusers_stays():
    q, k, v, _ = qkv(s=24)
    before = F.scaled_dot_product_attention(q, k, v)
    model, inputs = families.build("DiT")
    with sage.enabled() as seen:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), before)
        model(**inputs)
    assert seen.calls == 2


def test_nested_blocks():
    q, k, v, _ = qkv(s=200)
    plain = call(q, k, v)
    with sage.enabled() as outer:
        first = call(q, k, v)
        with sage.enabled(recipe="paper") as inner:
            paper = call(q, k, v)
        assert torch.equal(call(q, k, v), first), "the outer block goes on"
    assert (outer.calls, inner.calls) == (2, 1)
    assert not torch.equal(paper, first)
    assert torch.equal(call(q, k, v), plain)


def _registered():
    registry = _AttentionBackendRegistry
    return [
        dict(table)
        for table in (registry._backends, registry._constraints, registry._supported_arg_names)
    ]


def test_29_refusals_fallback_and_restore():
    q, k, v, _ = qkv(s=24)
    bias = torch.randn(1, 1, 24, 24)
    before = _registered()
    want = call(q, k, v, attn_mask=bias)
    modules = {name: module.F for name, module in sage._direct_callers()}
    with sage.enabled():
        assert all(sys.modules[name].F is not F for name in modules)
        for options, words in (
            (dict(attn_mask=bias), "attn_mask"),
            (dict(dropout_p=0.1), "dropout_p"),
        ):
            with pytest.raises(NotImplementedError, match=words):
                call(q, k, v, **options)
    with sage.enabled(fallback=True):
        with pytest.warns(UserWarning, match="attn_mask"):
            assert torch.equal(call(q, k, v, attn_mask=bias), want)
    assert _registered() == before
    assert modules and all(sys.modules[name].F is F for name in modules)
    assert (
        _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE].__name__
        != "sagebwd_attention"
    )
