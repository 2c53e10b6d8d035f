# SPDX-License-Identifier: Apache-2.0
"""``model.set_attention_backend("sagebwd")`` of diffusers: numbers, which models it concerns, and
what it refuses."""

import warnings

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

import diffusers_families as families  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402

from reference import exact_grads, grads_of, qkv, rel  # noqa: E402
from sagebwd.integrations import diffusers as sage  # noqa: E402

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def _clean():
    yield
    sage.disable()
    sage.unregister()
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)
    assert not sage._replaced and not sage._active
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["Wan, text to video", "Flux", "LTX-Video"])
def test_a_model_by_name(family):
    model, inputs = families.build(family)
    want, want_grads = families.step(model, inputs)
    calls = families.native_calls(model, inputs)
    seen = sage.register()
    model.set_attention_backend("sagebwd")
    got, grads = families.step(model, inputs)
    assert seen.calls == calls > 0
    flat = lambda table: torch.cat([table[n].flatten() for n in sorted(table)])
    assert 1e-5 < rel(got, want) < 0.03 and 1e-5 < rel(flat(grads), flat(want_grads)) < 0.06
    model.set_attention_backend("native")
    before = seen.calls
    assert torch.equal(families.step(model, inputs)[0], want) and seen.calls == before


def attend(q, k, v, **options):
    out = dispatch.dispatch_attention_fn(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    return out.transpose(1, 2)


def test_a_block_by_name():
    q, k, v, dout = qkv(s=40)
    want = exact_grads(q, k, v, dout)
    seen = sage.register()
    with dispatch.attention_backend("sagebwd"):
        got = grads_of(attend, q, k, v, dout)
    errors = [rel(a, b) for a, b in zip(got, (want[0], *want[2:]))]
    assert 1e-3 < max(errors) < 0.03
    assert seen.calls == 1 and dispatch._AttentionBackendRegistry._active_backend == "native"


def test_models_that_chose_another_backend_keep_it():
    ours, inputs = families.build("Flux")
    theirs, _ = families.build("Flux")
    theirs.set_attention_backend("native")
    seen = sage.register()
    ours.set_attention_backend("sagebwd")
    theirs(**inputs)
    assert seen.calls == 0
    ours(**inputs)
    assert seen.calls == 2


def test_processors_without_a_backend_are_refused():
    model, _ = families.build("Stable Diffusion 3")
    model.set_attention_backend("native")  # diffusers passes over them
    sage.register()
    with pytest.raises(ValueError, match="SD3Transformer2DModel cannot choose a backend.*enabled"):
        model.set_attention_backend("sagebwd")


def test_refusals_and_fallback():
    q, k, v, _ = qkv(s=24)
    sage.register()
    with dispatch.attention_backend("sagebwd"):
        with pytest.raises(NotImplementedError, match="dropout_p=0.1"):
            attend(q, k, v, dropout_p=0.1)
    seen = sage.register(fallback=True)
    with dispatch.attention_backend("sagebwd"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attend(q, k, v, dropout_p=0.1)
    assert sum(seen.passed_on.values()) == 1


def test_names():
    with pytest.raises(ValueError, match="has a backend 'flash' already"):
        sage.register("flash")
    first = sage.register()
    assert sage.register(recipe="paper") is not first, "a second call replaces the settings"
    with pytest.raises(ValueError, match="is the backend of register"):
        sage.enable("sagebwd")
    assert "sagebwd" in [name.value for name in dispatch.AttentionBackendName]
    sage.unregister()
    assert "sagebwd" not in [name.value for name in dispatch.AttentionBackendName]
    model, _ = families.build("Flux")
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("sagebwd")


def test_beside_the_hook_for_everything():
    """enabled() replaces diffusers' own backend; what falls back from ours is not caught by it."""
    q, k, v, _ = qkv(s=24)
    with sage.enabled() as everything:
        seen = sage.register()
        attend(q, k, v)
        with dispatch.attention_backend("sagebwd"):
            attend(q, k, v)
    assert everything.calls == seen.calls == 1


@pytest.mark.slow
def test_compiled():
    q, k, v, _ = qkv(s=24)
    seen = sage.register()
    ours = dispatch.AttentionBackendName("sagebwd")
    call = torch.compile(lambda: attend(q * 1.0, k, v, backend=ours), backend="eager")
    out = call()
    assert seen.calls >= 1 and rel(out, attend(q, k, v)) > 1e-4
