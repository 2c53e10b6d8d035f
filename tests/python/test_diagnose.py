# SPDX-License-Identifier: Apache-2.0
"""diagnose: captures, errors, verdicts."""

import io
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import sagebwd
from reference import exact_grads, qkv, rel, visible
from sagebwd.tools import diagnosis
from sagebwd.tools.capture import Capture, Layer, save

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("SAGEBWD_BIN", ROOT / "build" / "bin" / "sagebwd"))


class Tiny(torch.nn.Module):
    def __init__(self, call, gain=1.0):
        super().__init__()
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(32, 96, bias=False) for _ in range(2))
        self.call, self.gain = call, gain

    def forward(self, x):
        for layer in self.qkv:
            q, k, v = layer(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            x = x + self.call(q * self.gain, k, v).transpose(1, 2).flatten(2)
        return x


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q, k, v):
    return sagebwd.attention(q, k, v, layout="bhsd", causal=True)


@pytest.mark.parametrize("call", [sdpa, ours], ids=["sdpa", "sagebwd"])
def test_report(call):
    model = Tiny(call)
    x = torch.randn(2, 50, 32)
    model.qkv[0].weight.grad = torch.ones_like(model.qkv[0].weight)
    text = io.StringIO()
    report = sagebwd.diagnose(model, x, loss=lambda y: y.square().mean(), file=text)
    assert len(report.layers) == 2
    for layer in report.layers:
        assert layer.verdict == "fine"
        assert set(layer.errors) == {"O", "dQ", "dK", "dV", "P", "dS"}
        assert all(0 < e < 0.06 for e in layer.errors.values()), layer
    assert text.getvalue().count("fine") == 2
    assert (model.qkv[0].weight.grad == 1).all(), "gradients are left as they were"


def test_sensitive_layers_are_named():
    model = Tiny(sdpa, gain=300.0)
    report = sagebwd.diagnose(
        model, torch.randn(1, 60, 32), loss=lambda y: y.square().mean(), file=None
    )
    assert report.layers[0].max_logit > 30
    assert "sensitive (large logits); S in floating point gives" in report.layers[0].verdict


def test_errors_are_those_of_the_operators():
    q, k, v, dout = qkv(h=4, hk=2, s=90)
    layer = Layer(q, k, v, dout, None, True, True, (-1, -1))
    exact = diagnosis._exact(layer)
    want = exact_grads(q, k, v, dout, visible(90, 90, True))
    for name, w in zip(("O", "dQ", "dK", "dV"), (want[0], *want[2:])):
        assert rel(exact[name], w) < 1e-12


@pytest.mark.parametrize(
    "recipe",
    [
        sagebwd.Recipe(),
        sagebwd.Recipe(smooth_k=False, rotate=False),
        sagebwd.Recipe(rotate=False),
        sagebwd.Recipe.paper(),
        sagebwd.Recipe.paper(rotate=True),
    ],
    ids=sagebwd.Recipe.text,
)
@pytest.mark.parametrize("d", [64, 40])
def test_rebuilt_p_is_what_the_backward_uses(recipe, d):
    """With dO = the identity, dV holds the transpose of P."""
    q, k, v, _ = qkv(h=2, s=d, sk=900, d=d)
    k = k + 3
    lifted = replace(recipe, high_precision=("dV",))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = sagebwd.attention(*leaves, layout="bhsd", recipe=lifted, return_lse=True)
    (dv,) = torch.autograd.grad(out, v, torch.eye(d).expand(1, 2, d, d))
    layer = Layer(q.detach(), k.detach(), v.detach(), None, None, False, False, (-1, -1))
    p = diagnosis._rebuilt_p(layer, lifted, lse.detach())
    assert rel(dv.mT, p) < 1e-5


def test_reported_ds_is_of_the_values_that_the_forward_used():
    """A sharp head: D holds the rounding of V, and cancels only against the same in dP."""
    q, k, v, dout = qkv(h=1, s=128)
    k = torch.nn.functional.normalize(k, dim=-1) * 10
    layer = Layer(k.clone(), k, v, dout, None, False, False, (-1, -1))
    errors, _ = diagnosis._errors([(layer, diagnosis._exact(layer))], sagebwd.Recipe())
    assert errors["dS"] < 2 * errors["dQ"]


def test_captures_are_saved(tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    path = tmp_path / "captures.safetensors"
    sagebwd.diagnose(
        Tiny(sdpa), (torch.randn(1, 20, 32),), loss=lambda y: y.mean(), save_to=path, file=None
    )
    tensors = load_file(path)
    assert sorted(tensors) == sorted(
        f"layer.{i}.{n}" for i in range(2) for n in ("q", "k", "v", "dout")
    )
    assert tensors["layer.1.dout"].shape == (1, 2, 20, 16)


def _report(model, x, loss=lambda y: y.square().mean(), **options):
    return sagebwd.diagnose(model, x, loss=loss, file=None, **options)


@pytest.mark.parametrize(
    "call, words",
    [
        (
            dict(attn_mask=torch.rand(20, 20)),
            r"attn_mask of shape \(20, 20\) .*: it adds a bias.*flex_attention",
        ),
        (
            dict(attn_mask=torch.rand(20, 20) > 0.3),
            "attn_mask of shape .* too many different sets of keys",
        ),
        (dict(dropout_p=0.1), r"dropout \(call model.eval\(\)"),
    ],
    ids=["bias", "pattern", "dropout"],
)
def test_what_cannot_be_compared_is_said(call, words):
    call = {n: v.to(torch.get_default_device()) if n == "attn_mask" else v for n, v in call.items()}
    model = Tiny(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **call))
    verdict = _report(model, torch.randn(1, 20, 32)).layers[0].verdict
    assert re.match(f"not compared: {words}", verdict), verdict


def test_batch_sizes_that_differ_are_said():
    mask = _padded("right")[:, None, None]
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1], attn_mask=mask)
    report = _report(Tiny(call), torch.randn(2, 50, 32))
    assert "batch sizes that differ" in report.layers[0].verdict


class Odd(torch.nn.Linear):
    def forward(self, x):
        q = super().forward(x)[:, None]
        return sdpa(q, q, q)


def test_head_dims_that_cannot_be_compared_are_said():
    report = _report(Odd(32, 257), torch.randn(1, 20, 32))
    assert "head dim: expected 1 to 256" in report.layers[0].verdict


def test_p_of_padded_head_dims_is_that_of_the_kernels():
    tensors = (torch.randn(1, 2, 40, d) for d in (12, 12, 20))
    layer = Layer(*tensors, None, None, False, False, (-1, -1))
    recipe = sagebwd.Recipe()
    _, lse = sagebwd.attention(layer.q, layer.k, layer.v, layout="bhsd", return_lse=True)
    rows = diagnosis._rebuilt_p(layer, recipe, lse).sum(-1)
    assert (rows - 1).abs().max() < 1e-4  # its logits are those that lse was made from
    assert _report(Odd(32, 12), torch.randn(1, 20, 32)).layers[0].verdict == "fine"


def _padded(side):
    """Keys of which the second row lacks eight."""
    keep = torch.ones(2, 50, dtype=torch.bool)
    keep[1, slice(0, 8) if side == "left" else slice(42, 50)] = False
    return keep


MASKS = {
    "padding": lambda: _padded("right")[:, None, None],
    "causal and padding": lambda: _padded("left")[:, None, None] & visible(50, 50, True),
    "split documents": lambda: torch.arange(50)[:, None] % 3 == torch.arange(50) % 3,
    "window": lambda: visible(50, 50, True, (9, 0)),
    "window and padding": lambda: _padded("left")[:, None, None] & visible(50, 50, True, (9, 0)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_compared_as_what_they_are(name):
    """The captured pieces, put into exact attention, give what the model computed."""
    mask = MASKS[name]()
    seen = []

    def call(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
        seen.append((q, k, v, out))
        return out

    with Capture() as capture:
        model = Tiny(call)
        loss = model(torch.randn(2, 50, 32)).square().sum()
    for *_, out in seen:
        out.retain_grad()
    loss.backward()
    for layer, (q, k, v, out) in zip(capture.layers, seen):
        assert layer.unsupported is None
        want = exact_grads(q, k, v, out.grad, mask.expand(2, 2, 50, 50), scale=0.3)
        for key, whole in (("O", want[0]), ("dQ", want[2]), ("dK", want[3]), ("dV", want[4])):
            parts = [diagnosis._exact(piece)[key] for piece in layer.pieces()]
            norm = sum(p.square().sum() for p in parts).sqrt()
            assert norm.item() == pytest.approx(whole.norm().item(), rel=1e-6), key
    report = _report(model, torch.randn(2, 50, 32))
    for layer in report.layers:
        assert layer.verdict == "fine" and all(0 < e < 0.06 for e in layer.errors.values())


def test_masks_whose_queries_share_keys_are_compared():
    at = torch.arange(50)
    mask = (at[:, None] % 3 == at % 3) | (at < 10)
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    report = _report(Tiny(call), torch.randn(2, 50, 32))
    assert [layer.verdict for layer in report.layers] == ["fine", "fine"]


def test_packed_batches_are_compared():
    cu = torch.tensor([0, 13, 13, 40], dtype=torch.int32)  # the last ten tokens belong to none

    def call(q, k, v):
        flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        out = sagebwd.attention_varlen(*flat, cu, cu, causal=True, window_size=(11, 0))
        return out.unflatten(0, (1, -1)).transpose(1, 2)

    packed = _report(Tiny(call), torch.randn(1, 50, 32))
    assert [layer.verdict for layer in packed.layers] == ["fine", "fine"]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_multi_head_attention(need_weights, padded):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, x):
            padding = ~_padded("right") if padded else None
            return self.attention(x, x, x, key_padding_mask=padding, need_weights=need_weights)

    model, x = Model(), torch.randn(2, 50, 32)
    plain = model(x)
    outputs = []

    def loss(output):
        outputs.append(output)
        return output[0].square().mean()

    (layer,) = _report(model, x, loss).layers
    assert layer.verdict == "fine" and all(0 < e < 0.06 for e in layer.errors.values())
    torch.testing.assert_close(outputs[0][0], plain[0])
    assert (outputs[0][1] is None) != need_weights
    if need_weights:
        torch.testing.assert_close(outputs[0][1], plain[1])


def test_transformer_encoder():
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2)
    padding = ~_padded("right")
    report = sagebwd.diagnose(
        model,
        dict(src=torch.randn(2, 50, 32), src_key_padding_mask=padding),
        loss=lambda y: y.square().mean() + y[:, 0].sum(),
        file=None,
    )
    assert [layer.verdict for layer in report.layers] == ["fine", "fine"]


@pytest.mark.parametrize("implementation", ["sdpa", "sagebwd"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_with_padding_and_windows(implementation, side):
    transformers = pytest.importorskip("transformers")
    from sagebwd.integrations import transformers as hook

    hook.register()
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=12,
        attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).to(torch.get_default_device())
    tokens = torch.randint(64, (2, 50))
    batch = dict(input_ids=tokens, attention_mask=_padded(side).long(), labels=tokens)
    try:
        report = sagebwd.diagnose(model, batch, file=None)
    finally:
        hook.unregister()
    assert len(report.layers) == 2
    for layer in report.layers:
        assert layer.verdict == "fine" and all(0 < e < 0.06 for e in layer.errors.values()), layer


def test_saved_captures_say_what_was_computed(tmp_path):
    safe_open = pytest.importorskip("safetensors").safe_open
    path = tmp_path / "captures.safetensors"
    mask = _padded("left")[:, None, None] & visible(50, 50, True, (9, 0))
    calls = iter(
        [
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        ]
    )
    model = Tiny(lambda *t: next(calls)(*t))
    _report(model, torch.randn(2, 50, 32), save_to=path)
    with safe_open(path, "pt") as file:
        about = {key: json.loads(text) for key, text in file.metadata().items()}
        assert file.get_slice("layer.1.q").get_shape() == [1, 2, 92, 16]
    assert about["layer.0.attention"] == dict(
        causal=True, align="top_left", window=[-1, -1], softmax_scale=0.3
    )
    second = about["layer.1.attention"]
    assert second["causal"] and second["window"] == [9, -1] and second["softmax_scale"] == 0.25
    assert second["cu_seqlens_q"] == second["cu_seqlens_k"] == [0, 50, 92]
    with pytest.raises(ValueError, match="nothing was written"):
        save([], path)


def test_the_program_finds_the_same_errors(tmp_path):
    """A causal model with padding, through a file and the command line."""
    if not PROGRAM.exists():
        pytest.skip("build/bin/sagebwd is not built")
    path, out = tmp_path / "captures.safetensors", tmp_path / "trace.json"
    mask = visible(50, 50, True, (9, 0))
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    report = _report(Tiny(call), torch.randn(2, 50, 32), save_to=path)
    command = [PROGRAM, "trace", "--from", path, "--recipe", "vectorwise", "--json", out, "-q"]
    subprocess.run(command, check=True, capture_output=True)
    for layer, case in zip(report.layers, json.loads(out.read_text())["cases"], strict=True):
        assert "causal" in case["case"] and "window=9,-1 scale=0.3" in case["case"]
        for name in ("O", "dQ", "dK", "dV"):
            assert case["tensors"][name]["rel_l2"] == pytest.approx(layer.errors[name], rel=1e-3)


def test_refusals():
    with pytest.raises(ValueError, match="no loss"):
        sagebwd.diagnose(Tiny(sdpa), torch.randn(1, 20, 32), file=None)
    with pytest.raises(ValueError, match="no attention call"):
        sagebwd.diagnose(
            torch.nn.Linear(4, 4), torch.randn(1, 4), loss=lambda y: y.mean(), file=None
        )


def test_diagnose_prints_nothing_unless_asked(capsys):
    loss = lambda y: y.square().mean()
    report = sagebwd.diagnose(Tiny(sdpa), torch.randn(1, 20, 32), loss=loss)
    assert capsys.readouterr().out == ""
    assert repr(report) == str(report) and "verdict" in str(report)


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_codes_of_v_are_those_of_the_kernels(offset):
    # A query that sees one key has O = what the codes of its value stand for.
    q, k, v = (torch.randn(1, 400, 2, 32) for _ in range(3))
    v = v + offset
    o = sagebwd.attention(q, k, v, causal=True, window_size=(0, 0))
    want = diagnosis._value_codes(v.transpose(1, 2), sagebwd.Recipe()).transpose(1, 2)
    torch.testing.assert_close(o.double(), want, rtol=0, atol=1e-5)
    assert rel(o, v) > 1e-3
