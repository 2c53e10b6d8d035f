# SPDX-License-Identifier: Apache-2.0
"""A small Flux transformer of diffusers through the hook."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import (  # noqa: E402
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)

from reference import exact_grads, generator, grads_of, qkv, rel  # noqa: E402
from sagebwd.integrations import diffusers as sage  # noqa: E402


@pytest.fixture(autouse=True)
def _disabled():
    yield
    sage.disable()


def flux():
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip


def inputs():
    g = generator(2)
    make = lambda *shape: torch.randn(*shape, generator=g)
    ids = torch.zeros(36, 3)
    ids[:, 1], ids[:, 2] = torch.arange(36) // 6, torch.arange(36) % 6
    return dict(
        hidden_states=make(2, 36, 4), encoder_hidden_states=make(2, 20, 32),
        pooled_projections=make(2, 32),
        timestep=torch.tensor([0.3, 0.7]), img_ids=ids, txt_ids=torch.zeros(20, 3),
    )  # fmt: skip


def train_step(model):
    model.zero_grad()
    out = model(**inputs()).sample
    out.square().mean().backward()
    return out.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def test_flux_trains_a_step():
    model = flux()
    want, want_grads = train_step(model)
    with sage.enabled():
        got, got_grads = train_step(model)
    again, _ = train_step(model)
    assert torch.equal(again, want), "restored"
    assert 0 < rel(got, want) < 0.03
    touched = 0
    for name, grad in got_grads.items():
        if any(part in name for part in ("to_q", "to_k", "to_v", "add_q", "add_k", "add_v")):
            assert grad.abs().sum() > 0, name
            if "weight" in name:  # a bias of keys has no gradient but rounding
                assert rel(grad, want_grads[name]) < 0.06, name
                touched += 1
    assert touched >= 9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sage.enabled():
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**inputs()).sample.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


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
    with sage.enabled():
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
    assert (
        _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE].__name__
        != "sagebwd_attention"
    )
