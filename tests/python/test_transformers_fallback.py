# SPDX-License-Identifier: Apache-2.0
"""Layers that fall back on transformers' own attention equal it, on every option; what it does not
do right either is refused. Matmuls stay in floating point, so that only a wrong mask differs."""

import contextlib
import gc
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers_tiny import build, tiny  # noqa: E402

import sagebwd  # noqa: E402
from reference import rel  # noqa: E402
from sagebwd.integrations import transformers as sage  # noqa: E402

pytestmark = pytest.mark.cpu_only
B, S, NAME = 2, 12, "sage-fallback"
EXACT = sagebwd.Recipe(high_precision=tuple(sagebwd.recipe.MATMULS))
IDS = torch.randint(3, 19, (B, S), generator=torch.Generator().manual_seed(0))
PACKED = torch.cat([torch.arange(7), torch.arange(S - 7)]).expand(B, S)


@pytest.fixture(autouse=True)
def _registered():
    sage.register(NAME, recipe=EXACT, fallback="sdpa")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sagebwd: .*these layers run on")
        yield
    sage.unregister(NAME)


def padding(side):
    mask = torch.ones(B, S, dtype=torch.long)
    mask[-1, {"left": slice(0, 4), "right": slice(-4, None), "holes": slice(4, 7)}[side]] = 0
    return mask


@contextlib.contextmanager
def attention(model, name):
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    yield model
    model.set_attn_implementation(before)


def model_of(kind, **changes):
    """(a tiny model, the implementation of transformers that its layers fall back on)"""
    config_class = transformers.CONFIG_MAPPING[kind]
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config = tiny(config_class, **changes)
    model = build(getattr(transformers, names[kind]), config)
    other = "sdpa" if model._supports_sdpa and kind != "gemma2" else "eager"
    model.set_attn_implementation(other)
    return model, other


# Some layers fall back in the second, all in the others.
FAMILIES = {
    "gemma2": dict(attn_logit_softcapping=1.0, head_dim=264),  # sdpa may leave the capping out
    "gemma4_text": dict(),  # a head dim of 512 in the global layers, windows in the others
    "llama": dict(head_dim=264),
    "gpt_oss": dict(head_dim=264),  # sinks, which sdpa would leave out
    "llama4_text": dict(head_dim=264),  # chunks
}


@pytest.fixture(params=FAMILIES)
def family(request):
    if request.param not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    return model_of(request.param, **FAMILIES[request.param])


def results(model, keep=None, **inputs):
    model.zero_grad()
    logits = model(input_ids=IDS, **inputs).logits
    logits = logits if keep is None else logits[keep.bool()]
    logits.square().mean().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(grads)


def generated(model, **options):
    out = model.generate(
        IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False, return_dict_in_generate=True,
        output_logits=True, disable_compile=True, **options
    )  # fmt: skip
    return (torch.stack(out.logits),)


CASES = {
    "plain": dict(),
    "left": dict(attention_mask=padding("left"), use_cache=False),
    "right": dict(attention_mask=padding("right"), use_cache=False),
    "holes": dict(attention_mask=padding("holes"), use_cache=False),
    "packed": dict(position_ids=PACKED, use_cache=False),
}


REMAPS = hasattr(transformers.masking_utils, "remap_positions_for_packed_sequence")


def cases_of(model):
    """gpt-oss does not tell its mask of documents, and older versions of transformers count chunks
    on from one document to the next: their own attention mixes documents."""
    cases, kind = dict(CASES), model.config.model_type
    if kind == "gpt_oss" or (kind == "llama4_text" and not REMAPS):
        del cases["packed"]
        with attention(model, NAME), pytest.raises(NotImplementedError, match="one document a row"):
            model(IDS, **CASES["packed"])
    return cases


def test_equals_the_other_attention(family):
    model, other = family
    for name, inputs in cases_of(model).items():
        keep = inputs.get("attention_mask")
        want = results(model, keep, **inputs)
        with attention(model, NAME):
            got = results(model, keep, **inputs)
        for a, b in zip(got, want):
            assert rel(a, b) < 1e-5, name
    assert sage.fallbacks(NAME), other


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(family, cache):
    model, _ = family
    for mask in (torch.ones_like(IDS), padding("left")):
        options = dict(attention_mask=mask, cache_implementation=cache)
        try:
            (want,) = generated(model, **options)
        except TypeError:  # Llama 4 with a static cache in transformers 5.18
            pytest.skip("transformers itself fails")
        with attention(model, NAME):
            (got,) = generated(model, **options)
        assert rel(got, want) < 1e-5


@pytest.mark.slow
def test_layers_that_share_keys():
    """Gemma 4 hands the last queries alone to layers that share keys, with a part of the mask."""
    if "gemma4_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    kinds = ["sliding_attention", "full_attention"] * 2
    for window in (6, 32):
        model, _ = model_of(
            "gemma4_text", num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2,
            sliding_window=window,
        )  # fmt: skip
        for cache in ("dynamic", "static"):
            for mask in (torch.ones_like(IDS), padding("left")):
                options = dict(attention_mask=mask, cache_implementation=cache)
                (want,) = generated(model, **options)
                with attention(model, NAME):
                    (got,) = generated(model, **options)
                assert rel(got, want) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_dropout_draws_the_same(kind):
    model, _ = model_of(kind)
    for config in {
        id(m.config): m.config for m in model.modules() if hasattr(m, "config")
    }.values():
        config.attention_dropout = 0.3
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    model.train()
    outs = []
    for name in ("sdpa", NAME):
        with attention(model, name):
            torch.manual_seed(0)
            outs.append(results(model, attention_mask=padding("left"), use_cache=False))
    for a, b in zip(*outs):
        assert torch.equal(a, b)
    model.eval()
    with attention(model, NAME):
        results(model)
    (reason,) = sage.fallbacks(NAME)
    assert "dropout" in reason


def test_gradient_checkpointing(family):
    model, _ = family
    model.train()
    for inputs in cases_of(model).values():
        if "use_cache" not in inputs:
            continue
        with attention(model, NAME):
            model.gradient_checkpointing_disable()
            want = results(model, **inputs)
            model.gradient_checkpointing_enable()
            got = results(model, **inputs)
        for a, b in zip(got, want):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gemma2", marks=pytest.mark.long),
        pytest.param("gemma4_text", marks=pytest.mark.long),
    ],
)
def test_compiled(kind):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    model, other = model_of(kind, **FAMILIES[kind])
    cases = {name: CASES[name] for name in ("left", "packed")}
    with torch.no_grad():
        for name, inputs in cases.items():
            want = model(IDS, **inputs).logits
            with attention(model, NAME):
                torch._dynamo.reset()
                got = torch.compile(model, backend="aot_eager")(IDS, **inputs).logits
            keep = inputs.get("attention_mask", torch.ones_like(IDS)).bool()
            assert rel(got[keep], want[keep]) < 1e-5, name


def test_images_in_packed_documents():
    """Gemma 3 alone refuses them; transformers' mask knows both."""
    text = tiny(transformers.CONFIG_MAPPING["gemma3_text"])
    config = tiny(transformers.CONFIG_MAPPING["gemma3"], text_config=text)
    model = build(transformers.Gemma3ForConditionalGeneration, config)
    types = torch.zeros_like(IDS)
    types[:, 2:5] = types[:, 8:10] = 1
    for inputs in (dict(), dict(position_ids=PACKED, use_cache=False)):
        outs = []
        for name in ("sdpa", NAME):
            with attention(model, name), torch.no_grad():
                outs.append(model(IDS, token_type_ids=types, **inputs).logits)
        assert rel(*outs) < 1e-5
    assert len(sage.fallbacks(NAME)) == 1


def test_masks_of_the_caller():
    model, _ = model_of("llama")
    seen = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.5
    seen |= torch.eye(S, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    want = model(IDS, attention_mask=added).logits
    for fallback, mask in (("sdpa", seen), ("sdpa", added), ("eager", seen), ("eager", added)):
        sage.register(NAME, recipe=EXACT, fallback=fallback)
        with attention(model, NAME):
            assert rel(model(IDS, attention_mask=mask).logits, want) < 1e-5
    with attention(model, NAME), pytest.raises(NotImplementedError, match="another kind"):
        model(IDS, attention_mask=added.long())


def test_weights_are_those_of_eager():
    model, _ = model_of("llama")
    with attention(model, "eager"):
        want = model(IDS, output_attentions=True).attentions
    with attention(model, NAME):
        got = model(IDS, output_attentions=True).attentions
    assert len(want) == 2 and all(torch.equal(a, b) for a, b in zip(got, want))


def test_biases():
    model = build(transformers.T5ForConditionalGeneration, tiny(transformers.T5Config))
    model.eval()
    inputs = dict(input_ids=IDS, decoder_input_ids=IDS[:, :9], attention_mask=padding("left"))
    outs = []
    for name in ("eager", NAME):
        with attention(model, name):
            outs.append(model(**inputs).logits)
    assert rel(*outs) < 1e-5


# --- still refused --------------------------------------------------------------------------------


def test_documents_that_transformers_does_not_see_are_refused():
    model, _ = model_of("llama", head_dim=264)
    cu = torch.tensor([0, 7, S, S + 7, 2 * S], dtype=torch.int32)
    offsets = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    whole = torch.arange(S).expand(B, S)
    with attention(model, NAME):
        for inputs in (
            dict(position_ids=PACKED),  # a cache
            dict(position_ids=PACKED, attention_mask=torch.ones_like(IDS), use_cache=False),
            dict(position_ids=whole, use_cache=False, **offsets),
            dict(position_ids=PACKED, **offsets),
        ):
            with pytest.raises(NotImplementedError, match="use_cache=False"):
                model(IDS, **inputs)
        got = model(IDS, position_ids=PACKED, use_cache=False, **offsets).logits
    assert torch.equal(got, model(IDS, position_ids=PACKED, use_cache=False).logits)


def test_a_model_that_does_not_say_is_refused():
    """Without a mask, sdpa takes a module for causal by its attribute, and eager does not."""
    call = transformers.AttentionInterface._global_mapping[NAME]
    module = torch.nn.Module()
    module.is_causal = True
    q = torch.randn(1, 2, 8, 264)
    with pytest.raises(NotImplementedError, match="no mask.*eager"):
        call(module, q, q, q, None, dropout=0.1)
    s, kv = 8, 12
    k = torch.randn(1, 2, kv, 264)
    got, _ = call(module, q, k, k, None, is_causal=True, scaling=264**-0.5)
    seen = torch.ones(s, kv, dtype=torch.bool).tril(kv - s)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, seen).transpose(1, 2)
    assert rel(got, want) < 1e-6, "the last query sits at the last key"
    assert ["head dim" in reason for reason in sage.fallbacks(NAME)] == [True]


def test_keywords_that_nobody_obeys_are_refused():
    model, _ = model_of("llama")
    with attention(model, NAME):
        for keyword in ("head_mask", "block_indices", "cache"):
            with pytest.raises(NotImplementedError, match="nor by PyTorch"):
                model(IDS, **{keyword: torch.ones(())})


def test_sparse_linear_layers_do_not_fall_back():
    from sagebwd import sla2

    model, _ = model_of("llama", head_dim=32)
    model.set_attn_implementation(NAME)
    sla2.convert(model, keep=0.5)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(IDS, output_attentions=True)


# --- what is said ---------------------------------------------------------------------------------


def test_one_warning_lists_the_layers():
    model, _ = model_of("llama", head_dim=264, num_hidden_layers=3)
    gc.collect()  # patterns of other tests that were refused: exceptions hold them
    with attention(model, NAME), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(IDS)
        model(IDS)
    said = [str(w.message) for w in caught if "sagebwd" in str(w.message)]
    layers = [f"{i} (LlamaAttention)" for i in range(3)]
    assert len(said) == 1 and "264" in said[0] and ", ".join(layers) in said[0]
    assert list(sage.fallbacks(NAME).values()) == [layers]


def test_the_default_refuses_and_names_the_fallback():
    sage.register(NAME)
    model, _ = model_of("llama", head_dim=264)
    with attention(model, NAME), pytest.raises(NotImplementedError, match="fallback='sdpa'"):
        model(IDS)
    with pytest.raises(ValueError, match="'sdpa' or 'eager'"):
        sage.register(NAME, fallback="flash")
