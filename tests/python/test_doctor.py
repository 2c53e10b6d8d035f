# SPDX-License-Identifier: Apache-2.0
"""``sagebwd doctor`` on small checkpoints: language models, an image model, a pipeline; what it
finds in them, and what it says where it can examine nothing."""

import json
import re

import pytest
import torch

from sagebwd.recipe import as_recipe
from sagebwd.tools.capture import Layer
from sagebwd.tools.doctor import __main__ as doctor
from sagebwd.tools.doctor import advice, layers, load, speed
from sagebwd.tools.doctor.load import CannotExamine

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]
SIZES = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setitem(speed.TOKENS, "cpu", (64,))


def saved(place, model, **weights):
    """The directory of a checkpoint; ``weights``: {part of a name: factor}."""
    for part, factor in weights.items():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.data.mul_(factor)
    model.save_pretrained(place)
    return str(place)


def llama(**changes):
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 128, **changes})
    return transformers.LlamaForCausalLM(config)


def test_a_language_model(tmp_path, capsys):
    place = saved(tmp_path / "model", llama())
    doctor.main([place, "--tokens", "96", "--html", str(tmp_path / "page.html")])
    text, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    for i in range(2):
        numbers = rf"model\.layers\.{i}\.self_attn +((?:0\.0\d+ +){{4}})[\d.]+ +0\.0000  fine"
        assert re.search(numbers, text), text
    assert "2 attention calls; 96 random tokens" in text
    assert "whole model: 2 calls in INT8" in text and "elsewhere" not in text
    assert "64 tokens, forward and backward" in text
    assert "The default recipe: no call has an error above 6%." in text
    assert "Later tokens" not in text
    assert 'attn_implementation="sagebwd"' in text
    for words in ("model.layers.1.self_attn", "<svg", "fine", "gradients of all weights"):
        assert words in page
    assert "nan" not in text + page


def test_the_whole_model_is_as_exact_as_its_parts(tmp_path):
    place = saved(tmp_path, llama())
    found = doctor.find(load.load(place, "cpu", 96, 64), place, "cpu")
    assert 1e-4 < found.whole.error < 0.03 and found.whole.worst[1] < 0.06
    assert abs(found.whole.loss - found.whole.loss_int8) < 1e-2
    exact = doctor.find(
        load.load(place, "cpu", 96, 64), place, "cpu", "vectorwise lift=S,O,S',dV,dP,dQ,dK"
    )
    assert exact.whole.error < 1e-4
    assert max(e.worst for e in exact.examined) < 1e-4


def test_calls_that_cannot_run_are_counted(tmp_path):
    config = transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    place = saved(tmp_path, transformers.T5ForConditionalGeneration(config))
    found = doctor.find(load.load(place, "cpu", 32, 64), place, "cpu")
    verdicts = [e.report.verdict[:12] for e in found.examined]
    assert verdicts == ["not compared", "not compared", "fine"]
    assert found.whole.calls == 1 and sum(found.whole.elsewhere.values()) == 2
    assert "2 of 3 calls cannot run in INT8" in " ".join(found.advice)


def test_attention_that_cannot_be_captured(tmp_path):
    """Soft caps: eager attention of transformers, which the hook replaces all the same."""
    config = transformers.Gemma2Config(
        **SIZES, vocab_size=128, num_key_value_heads=1, head_dim=32, sliding_window=64
    )
    place = saved(tmp_path, transformers.Gemma2ForCausalLM(config))
    found = doctor.find(load.load(place, "cpu", 32, 64), place, "cpu")
    assert not found.examined and found.whole.calls == 2 and 1e-4 < found.whole.error < 0.05
    assert "No call could be compared by itself" in found.advice[0]
    assert "max logit" not in "\n".join(doctor.text.lines(found))
    assert "Not timed" in doctor.page.page(found)


def test_an_image_model(tmp_path):
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    place = saved(tmp_path, transformers.ViTForImageClassification(config))
    found = doctor.find(load.load(place, "cpu", 32, 64), place, "cpu")
    assert "one image of noise, 32 × 32" in found.title
    assert found.whole.calls == len(found.examined) == 2
    assert all(e.leak != e.leak for e in found.examined), "nothing is causal"


def test_a_pipeline(tmp_path):
    """Its parts make the inputs; the denoiser is looked at in the middle of a run."""
    diffusers = pytest.importorskip("diffusers")
    denoiser = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=2,
        sample_size=8, norm_type="ada_norm_zero", num_embeds_ada_norm=1000,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    diffusers.DiTPipeline(denoiser, vae, diffusers.DDIMScheduler()).save_pretrained(tmp_path)
    found = doctor.find(load.load(str(tmp_path), "cpu", 32, 64), "dit", "cpu")
    assert [e.module for e in found.examined] == [f"transformer_blocks.{i}.attn1" for i in range(2)]
    assert found.whole.calls == 2 and 1e-5 < found.whole.error < 0.05
    assert "diffusers.enabled()" in found.whole.switch and "call 3 in 4 steps" in found.title
    with pytest.raises(CannotExamine, match="give the pipeline's directory"):
        load.load(str(tmp_path / "transformer"), "cpu", 32, 64)


def test_a_pipeline_with_text(tmp_path):
    """Wan: a text encoder, and two calls of the denoiser in a step."""
    diffusers = pytest.importorskip("diffusers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate("<pad> </s> <unk> a red fox walks".split())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    diffusers.WanPipeline(
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        text_encoder=transformers.UMT5EncoderModel(
            transformers.UMT5Config(
                vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2
            )
        ),
        vae=diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, in_channels=16, out_channels=16,
            text_dim=32, freq_dim=16, ffn_dim=64, num_layers=2,
        ),
    ).save_pretrained(tmp_path)  # fmt: skip
    found = doctor.find(load.load(str(tmp_path), "cpu", 32, 64), "wan", "cpu")
    names = [f"blocks.{i}.attn{j}" for i in range(2) for j in (1, 2)]
    assert [e.module for e in found.examined] == names
    assert found.whole.calls == 4 and 1e-5 < found.whole.error < 0.05


@pytest.mark.parametrize("config, words", [
    (None, "found neither"),
    ({"architectures": ["MyModel"]}, "names the class MyModel"),
    ({}, "names the class None"),
])  # fmt: skip
def test_refusals(tmp_path, config, words):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=words):
        doctor.main([str(tmp_path)])


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match="in a directory or on the hub, and found neither"):
        doctor.main(["nobody/nothing-of-this-name"])


def test_a_name_that_does_not_exist():
    with pytest.raises(SystemExit, match="neither a directory nor a name"):
        doctor.main(["/no/such/place"])


# --- advice ---------------------------------------------------------------------------------------


def examined(worst, remedy="", module="model.layers.{}.self_attn"):
    reports = [
        layers.diagnosis.LayerReport(i, dict.fromkeys(layers.TENSORS, e), 1.0, "", remedy)
        for i, e in enumerate(worst)
    ]
    return [
        layers.Examined(module.format(r.index), (2, 2, 8, 8, 32), False, r, float("nan"))
        for r in reports
    ]


class Hook:
    switch, calls, elsewhere, error = "hook", 4, {}, 0.01


def recipe(*worst, library="transformers", **kwargs):
    return advice.advise(library, examined(worst, **kwargs), Hook, [])[0]


def test_advice():
    assert "The default recipe: no call" in recipe(0.01, 0.05)
    assert "exact_layers=[3]" in recipe(0.01, 0.01, 0.01, 0.2, remedy="x")
    assert "exact_layers" not in recipe(0.01, 0.01, 0.01, 0.2, remedy="x", library="diffusers")
    assert "exact_layers" not in recipe(0.01, 0.2, 0.2, 0.2, remedy="x")
    assert '1 of them above 15%. What helps most: `backward="bf16"`' in recipe(
        0.1, 0.2, remedy='backward="bf16"'
    )
    assert "not finite" in recipe(0.01, float("nan"))
    none = type("None_", (Hook,), {"calls": 0})
    assert "cannot run" in advice.advise("transformers", examined([0.1]), none, [])[0]


def test_leaks_are_those_of_a_prefix():
    """Lifted attention shares no scale between tokens."""
    q, k, v = torch.randn(3, 1, 2, 100, 32)
    call = dict(causal=True, top_left=True, window=(-1, -1), scale=None, dout=None)
    layer = Layer(q, k, v, **call)
    assert 1e-3 < layers.leak(layer, as_recipe("paper")) < 0.05
    assert layers.leak(layer, as_recipe("vectorwise")) == 0
    assert layers.leak(layer, as_recipe("paper lift=S,O,S',dV,dP,dQ,dK smooth_k=off")) < 1e-5
