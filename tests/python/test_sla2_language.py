# SPDX-License-Identifier: Apache-2.0
"""sagebwd.sla2.convert: language models of transformers with causal sparse-linear attention."""

import pytest
import torch

import sagebwd
from reference import rel
from sagebwd import sla2
from sagebwd.recipe import MATMULS

transformers = pytest.importorskip("transformers")
from sagebwd.integrations import transformers as sage  # noqa: E402

pytestmark = pytest.mark.cpu_only

EXACT = sagebwd.Recipe(high_precision=tuple(MATMULS))
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def model_of(family="Llama", **changes):
    torch.manual_seed(1)
    config = dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=32, max_position_embeddings=1024,
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**(config | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    # Larger logits than random weights give, so that it matters which keys a query sees.
    for name, p in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            p.data *= 8
    return model


def ids(tokens=600, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 32, (2, tokens), generator=g)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral"])
def test_all_blocks_give_the_model_that_was(family):
    changes = {"sliding_window": None} if family == "Mistral" else {}
    model, plain = model_of(family, **changes), model_of(family, **changes)
    assert sla2.convert(model, keep=1, recipe=EXACT) == LAYERS
    assert model.config._attn_implementation == "sagebwd"
    assert rel(model(ids()).logits, plain(ids()).logits) < 1e-4
    for layer in model.model.layers:
        layer.self_attn.sla2.keep = 0.2
    assert rel(model(ids()).logits, plain(ids()).logits) > 1e-3


def test_later_tokens_change_nothing_and_parameters_train():
    model = model_of()
    sla2.convert(model, keep=0.2, recipe=EXACT, rows=5)
    changed = ids()
    changed[:, 300:] = (changed[:, 300:] + 7) % 32
    with torch.no_grad():
        a, b = model(ids()).logits, model(changed).logits
    assert rel(a[:, :300], b[:, :300]) < 1e-4 and rel(a[:, 300:], b[:, 300:]) > 0.1
    model.gradient_checkpointing_enable()
    model.train()
    model(ids(), labels=ids(), use_cache=False).loss.backward()
    layer = model.model.layers[1].self_attn
    assert layer.sla2.alpha.logit.grad.abs().sum() > 0 and layer.q_proj.weight.grad.isfinite().all()


def test_stage_1():
    model = model_of()
    sla2.convert(model, keep=0.2, where="*.1.*", rows=5)
    assert not hasattr(model.model.layers[0].self_attn, "sla2")
    (layer,) = sla2.fit(model, [dict(input_ids=ids(seed=s)) for s in range(3)], steps=5)
    assert layer.name == LAYERS[1] + ".sla2" and max(layer.error) < 1
    assert not torch.equal(model.model.layers[1].self_attn.sla2.alpha.logit, torch.ones(4, 5))


@pytest.mark.long
def test_compiled():
    model = model_of()
    sage.register("unpacked", packed=False)
    model.set_attn_implementation("unpacked")
    sla2.convert(model, keep=0.2)
    assert model.config._attn_implementation == "unpacked"  # a name of ours is left as it is
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = [m(ids(), use_cache=False).logits for m in (model, compiled)]
    sage.unregister("unpacked")
    assert rel(*results) < 1e-5


def test_what_a_converted_model_refuses():
    model = model_of()
    sla2.convert(model, keep=0.2)
    mask = torch.ones(2, 600, dtype=torch.long)
    model(ids(), attention_mask=mask)
    mask[0, :9] = 0
    with pytest.raises(NotImplementedError, match="padding"):
        model(ids(), attention_mask=mask)
    packed = torch.cat((torch.arange(300), torch.arange(300))).expand(2, -1)
    with pytest.raises(NotImplementedError, match="packed"):
        model(ids(), position_ids=packed, use_cache=False)
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        model.generate(ids(), max_new_tokens=2, do_sample=False)
    out = model.generate(ids(), max_new_tokens=2, do_sample=False, use_cache=False)
    assert out.shape == (2, 602)
    # Another attention would leave sla2 out without a word.
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        model(ids())
    model.set_attn_implementation("sagebwd")
    model(ids())


def test_what_cannot_be_converted():
    for model, words in (
        (model_of("Mistral", sliding_window=64), None),
        (model_of("Qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=0), "64"),
        (model_of("Gemma2", query_pre_attn_scalar=5), "scales logits|tokens only"),
    ):
        if words is None:  # the layers do not tell; the call does
            sla2.convert(model, keep=0.2)
            with pytest.raises(NotImplementedError, match="not causal alone"):
                model(ids())
            continue
        with pytest.raises(NotImplementedError, match=words):
            sla2.convert(model, keep=0.2)
        assert not any(isinstance(m, sla2.Attention) for m in model.modules())
    with pytest.raises(NotImplementedError, match="causal=True for language models"):
        sla2.convert(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=48)))
    for changes, words in (
        (dict(order="cube"), "raster"),
        (dict(causal=True), "leave it out"),
        (dict(where="*attn1"), "model.layers.0.self_attn"),
        (dict(keep=0), "keep"),
    ):
        model = model_of()
        with pytest.raises(ValueError, match=words):
            sla2.convert(model, **changes)
        assert model.config._attn_implementation != "sagebwd"


def test_checkpoints_are_strict():
    model = model_of()
    sla2.convert(model, keep=0.2)
    with pytest.raises(RuntimeError, match="Unexpected key.*sla2"):
        model_of().load_state_dict(model.state_dict())
    twin = model_of()
    sla2.convert(twin, keep=0.2)
    twin.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="converted already"):
        sla2.convert(twin)


def test_saved_loaded_and_reverted(tmp_path):
    model = model_of()
    sla2.convert(model, keep=0.2, where="*.1.*", recipe=EXACT, rows=5)
    for name, p in model.named_parameters():
        if "sla2" in name:
            torch.nn.init.normal_(p)
    want = model(ids()).logits
    sla2.save(model, tmp_path)
    assert torch.equal(sla2.load(type(model), tmp_path)(ids()).logits, want)
    with pytest.warns(UserWarning, match="from_pretrained would leave out.*sla2.load"):
        model.save_pretrained(tmp_path / "plain")
    assert torch.equal(sla2.load(type(model), tmp_path / "plain")(ids()).logits, want)
    assert sla2.revert(model) == LAYERS[1:]
    assert model.config._attn_implementation == model_of().config._attn_implementation
    assert torch.equal(model(ids()).logits, model_of()(ids()).logits)
