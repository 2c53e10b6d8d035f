# SPDX-License-Identifier: Apache-2.0
"""The hooks for axolotl, verl and ComfyUI, called as these call them: small modules in their names
have the same classes, arguments and order of calls. Gradients are compared with exact attention."""

import importlib
import pathlib
import re
import sys
import types

import pytest
import torch

from reference import exact, exact_grads, grads_of, qkv, rel
from sagebwd.integrations import comfyui

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def modules(monkeypatch):
    """Makes modules by name, with what they hold."""

    def make(name, **held):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            inner = ".".join(parts[:i])
            if inner not in sys.modules:
                monkeypatch.setitem(sys.modules, inner, types.ModuleType(inner))
            if i > 1:
                parent = sys.modules[".".join(parts[: i - 1])]
                monkeypatch.setattr(parent, parts[i - 1], sys.modules[inner], raising=False)
        vars(sys.modules[name]).update(held)
        return sys.modules[name]

    return make


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


#: A row of three documents as trainers give it: positions start again.
PACKED = torch.cat([torch.arange(n) for n in (20, 9, 19)])[None]
TOKENS = torch.arange(48)[None] % 61


def gradients(model, **inputs):
    model.zero_grad()
    model(TOKENS, labels=TOKENS, **inputs).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def documents_apart(model):
    """The same gradients from one row for each document."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    cuts = [0, 20, 29, 48]
    logits = [model(TOKENS[:, a:b]).logits for a, b in zip(cuts, cuts[1:])]
    logits = torch.cat(logits, 1)[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[0, 1:]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


PAGE = pathlib.Path(__file__).parents[2] / "docs/plugins.md"


def block(language, words):
    """The block of the page that holds these words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    (text,) = (text for text in found if words in text)
    return text


# --- axolotl --------------------------------------------------------------------------------------


class Config(dict):
    """axolotl's configuration: a key that is missing is None."""

    __getattr__ = dict.get


@pytest.fixture
def plugin(modules):
    """As axolotl loads it: by the name in the configuration, made without arguments."""
    pytest.importorskip("transformers")
    base = type("BasePlugin", (), {"get_input_args": lambda self: None})
    modules("axolotl.integrations.base", BasePlugin=base)
    name, kind = "sagebwd.integrations.axolotl.SagePlugin".rsplit(".", 1)
    sys.modules.pop(name, None)
    made = getattr(importlib.import_module(name), kind)()
    assert isinstance(made, base)
    yield made
    sys.modules.pop(name, None)
    from sagebwd.integrations import transformers

    transformers.unregister()


@pytest.mark.slow
def test_axolotl_packs(plugin):
    """Its collator numbers the documents of a row in the mask, and positions start again."""
    model = llama()
    want = documents_apart(model)
    model.set_attn_implementation("sdpa")
    plugin.post_model_build(Config(sample_packing=True, attn_implementation="sdpa"), model)
    assert model.config._attn_implementation == "sagebwd"
    numbers = torch.cat([torch.full((n,), i + 1) for i, n in enumerate((20, 9, 19))])[None]
    got = gradients(model, attention_mask=numbers, position_ids=PACKED)
    assert 1e-4 < rel(got, want) < 0.03


@pytest.mark.slow
def test_axolotl_passes_arguments_on(plugin):
    model = llama()
    lifted = "vectorwise lift=S,O,S',dV,dP,dQ,dK"
    plugin.post_model_build(Config(sagebwd={"recipe": lifted}), model)
    exact_one = gradients(model)
    model.set_attn_implementation("eager")
    assert rel(exact_one, gradients(model)) < 1e-4
    with pytest.raises(TypeError):
        plugin.post_model_build(Config(sagebwd={"recipes": "paper"}), llama())


@pytest.mark.slow
def test_axolotl_page(plugin):
    yaml = pytest.importorskip("yaml")
    config = Config(yaml.safe_load(block("yaml", "SagePlugin")))
    assert config.plugins == [f"{type(plugin).__module__}.{type(plugin).__name__}"]
    config.sagebwd["exact_layers"] = [1]  # the model has two
    model = llama()
    plugin.post_model_build(config, model)
    assert gradients(model).isfinite().all()


def test_axolotl_declares_its_key(plugin):
    pytest.importorskip("pydantic")
    module, name = plugin.get_input_args().rsplit(".", 1)
    arguments = getattr(importlib.import_module(module), name)
    assert arguments(sagebwd={"recipe": "paper"}).sagebwd == {"recipe": "paper"}
    assert arguments().sagebwd is None


def test_axolotl_refusals(plugin):
    with pytest.raises(NotImplementedError, match="context_parallel_size: 2.*set context_p"):
        plugin.post_model_build(Config(context_parallel_size=2), None)
    own = type("Own", (), {"is_backend_compatible": lambda self: False})()
    with pytest.raises(NotImplementedError, match="Own has attention code of its own"):
        plugin.post_model_build(Config(), own)


# --- verl -----------------------------------------------------------------------------------------


@pytest.fixture
def verl(modules):
    """As verl imports it: by importlib, from the name in the configuration."""
    pytest.importorskip("transformers")
    ranks = [1]
    modules("verl.utils.ulysses", get_ulysses_sequence_parallel_world_size=lambda: ranks[0])
    sys.modules.pop("sagebwd.integrations.verl", None)
    importlib.import_module("sagebwd.integrations.verl")
    yield ranks
    sys.modules.pop("sagebwd.integrations.verl", None)
    from sagebwd.integrations import transformers

    transformers.unregister()


@pytest.mark.slow
def test_verl_rows_without_padding(verl):
    """It builds the config with the name, and gives positions and no mask."""
    want = documents_apart(llama())
    model = llama(attn_implementation="sagebwd")
    assert model.config._attn_implementation == "sagebwd"
    got = gradients(model, attention_mask=None, position_ids=PACKED)
    assert 1e-4 < rel(got, want) < 0.03


def test_verl_sequence_parallelism_is_refused(verl):
    model = llama(attn_implementation="sagebwd")
    verl[0] = 2
    with pytest.raises(NotImplementedError, match="ulysses_sequence_parallel_size=2.*set it to 1"):
        gradients(model, position_ids=PACKED)


def test_verl_page(verl):
    exec(block("py", "verl.register"), {})


# --- ComfyUI --------------------------------------------------------------------------------------


@pytest.fixture
def comfy(modules):
    """Its table of attention functions, which keeps the first of a name."""
    table = modules("comfy.ldm.modules.attention", REGISTERED_ATTENTION_FUNCTIONS={})
    table.register_attention_function = table.REGISTERED_ATTENTION_FUNCTIONS.setdefault
    return table


def called(function, **options):
    """A function of [b, h, s, d] tensors, called with channels folded as ComfyUI does."""

    def call(q, k, v):
        folded = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
        out = function(*folded, q.shape[1], **options)
        return out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    return call


def test_comfyui(comfy):
    q, k, v, dout = qkv(h=4, s=50)
    want = exact_grads(q, k, v, dout)
    assert comfyui.register() is comfy.REGISTERED_ATTENTION_FUNCTIONS["sagebwd"]
    function = comfy.REGISTERED_ATTENTION_FUNCTIONS["sagebwd"]
    got = grads_of(called(function, transformer_options={}, attn_precision=None), q, k, v, dout)
    errors = [rel(a, b) for a, b in zip(got, (want[0], *want[2:]))]
    assert 1e-3 < min(errors) and max(errors) < 0.03
    shaped = function(q, k, v, 4, skip_reshape=True, skip_output_reshape=True)
    assert torch.equal(shaped, got[0])


@pytest.mark.parametrize("shape", [(50, 50), (2, 50, 50), (2, 1, 50, 50)])
def test_comfyui_masks(comfy, shape):
    q, k, v, _ = qkv(b=2, h=2, s=50)
    seen = torch.ones(50, 50, dtype=torch.bool)
    seen[:, 30:] = False
    out = called(comfyui.attention, mask=seen.expand(shape))(q, k, v)
    assert 1e-3 < rel(out, exact(q, k, v, seen)[0]) < 0.03


def test_comfyui_page(comfy):
    exec(block("py", "comfyui.register"), {})
    assert "sagebwd" in comfy.REGISTERED_ATTENTION_FUNCTIONS


def test_comfyui_refusals(comfy):
    q, k, v, _ = qkv(h=2, s=20)
    ours = called(comfyui.register())
    bias = torch.randn(20, 20)
    with pytest.raises(NotImplementedError, match="fallback=True"):
        called(comfyui.attention, mask=bias)(q, k, v)
    out = called(comfyui.attention, mask=bias, fallback=True)(q, k, v)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    assert rel(out, want) < 1e-6
    with pytest.raises(NotImplementedError, match="keyword 'sparsity'"):
        called(comfyui.attention, sparsity=2)(q, k, v)
    plain = called(comfyui.attention, low_precision_attention=False)(q, k, v)
    assert rel(plain, exact(q, k, v)[0]) < 1e-6 < rel(ours(q, k, v), plain)
    with pytest.raises(ValueError, match="'sagebwd' already"):
        comfyui.register()
    del comfy.register_attention_function
    with pytest.raises(ImportError, match="update it"):
        comfyui.register("other")
