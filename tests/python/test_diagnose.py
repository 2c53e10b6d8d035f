# SPDX-License-Identifier: Apache-2.0
"""diagnose: captures, errors, verdicts."""

import io

import pytest
import torch
import torch.nn.functional as F

import sagebwd
from reference import exact_grads, qkv, rel, visible
from sagebwd import diagnosis
from sagebwd.capture import Layer


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


@pytest.mark.parametrize("recipe", ["vectorwise", "paper"])
def test_rebuilt_p_is_what_the_backward_uses(recipe):
    """With dO = the identity, dV holds the transpose of P."""
    q, k, v, _ = qkv(h=2, s=64, sk=150)
    k = k + 3
    lifted = sagebwd.Recipe(
        **{**sagebwd.recipe.as_recipe(recipe).__dict__, "high_precision": ("dV",)}
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = sagebwd.attention(*leaves, layout="bhsd", recipe=lifted, return_lse=True)
    (dv,) = torch.autograd.grad(out, v, torch.eye(64).expand(1, 2, 64, 64))
    layer = Layer(q.detach(), k.detach(), v.detach(), None, None, False, False, (-1, -1))
    p = diagnosis._rebuilt_p(layer, lifted, lse.detach())
    assert rel(dv.mT, p) < 1e-5


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


def test_masks_are_said_not_compared():
    model = Tiny(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(20, 20))
    )
    report = sagebwd.diagnose(model, torch.randn(1, 20, 32), loss=lambda y: y.mean(), file=None)
    assert report.layers[0].verdict == "not compared: an attention mask"


def test_refusals():
    with pytest.raises(ValueError, match="no loss"):
        sagebwd.diagnose(Tiny(sdpa), torch.randn(1, 20, 32), file=None)
    with pytest.raises(ValueError, match="no attention call"):
        sagebwd.diagnose(
            torch.nn.Linear(4, 4), torch.randn(1, 4), loss=lambda y: y.mean(), file=None
        )
