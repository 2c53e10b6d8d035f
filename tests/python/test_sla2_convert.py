# SPDX-License-Identifier: Apache-2.0
"""sagebwd.sla2.convert: Wan models of diffusers with sparse-linear attention."""

import copy
import inspect
import warnings

import pytest
import torch

from reference import rel
from sagebwd import sla2
from sagebwd.sla2.token_order import box_order

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.cpu_only

SELF = ["blocks.0.attn1", "blocks.1.attn1"]


def wan(kind="WanTransformer3DModel", **changes):
    torch.manual_seed(1)
    config = dict(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=24,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    model = getattr(diffusers, kind)(**(config | changes))
    # Larger logits than random weights give, so that it matters which keys a query sees.
    for name, p in model.named_parameters():
        if "attn1.norm" in name:
            p.data *= 2
    return model


def video(frames=6, height=16, width=12, seed=0):
    """6 × 8 × 6 patches; no side is a multiple of 4 but one."""
    g = torch.Generator().manual_seed(seed)
    return dict(
        hidden_states=torch.randn(2, 4, frames, height, width, generator=g),
        timestep=torch.tensor([3, 700]),
        encoder_hidden_states=torch.randn(2, 7, 24, generator=g),
    )


def set_keep(model, keep):
    for module in model.modules():
        if isinstance(module, sla2.Attention):
            module.keep = keep


def gradients(model, inputs):
    model.zero_grad()
    inputs = dict(inputs, hidden_states=inputs["hidden_states"].clone().requires_grad_())
    out = model(**inputs).sample
    out.square().mean().backward()
    return out, inputs["hidden_states"].grad, model.blocks[0].attn1.to_k.weight.grad


@pytest.mark.parametrize(
    "options", [{}, dict(order="cube"), dict(order="cube", box=(2, 8, 4))], ids=str
)
def test_all_blocks_give_the_model_that_was(options):
    """Tokens in boxes, angles with them, and back: nothing but INT8 makes a difference."""
    want = gradients(wan(), video())
    model = wan()
    assert sla2.convert(model, keep=1, **options) == SELF
    for name, a, b in zip(("out", "d input", "dWk"), gradients(model, video()), want):
        assert rel(a, b) < 0.03, name
    # A time for each token, as Wan 2.2 has it.
    times = dict(video(), timestep=torch.randint(0, 1000, (2, 288)))
    assert rel(model(**times).sample, wan()(**times).sample) < 0.01
    assert rel(model(**times).sample, model(**video()).sample) > 0.02


def test_a_model_with_control_states():
    """VACE has attention of the same class in two lists of blocks, and no order of its own."""
    kind = dict(kind="WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=6)
    inputs = dict(video(), control_hidden_states_scale=torch.ones(1))
    inputs["control_hidden_states"] = torch.randn(2, 6, 6, 16, 12)
    model = wan(**kind)
    assert sla2.convert(model, keep=1) == [*SELF, "vace_blocks.0.attn1"]
    assert rel(model(**inputs).sample, wan(**kind)(**inputs).sample) < 0.01
    with pytest.raises(NotImplementedError, match="raster"):
        sla2.convert(wan(**kind), order="cube")


def test_blocks_are_boxes():
    order = box_order((6, 8, 6), (4, 4, 4))
    assert sorted(order.tolist()) == list(range(288))
    frame, row, column = order[:64] // 48, order[:64] // 6 % 8, order[:64] % 6
    assert max(frame) == max(row) == max(column) == 3  # the first box, all of it
    assert torch.equal(box_order((3, 4, 5), (1, 1, 1)), torch.arange(60))

    seen = []
    model = wan()
    sla2.convert(model, keep=0.3, order="cube")
    plain = wan()
    for m in (model, plain):
        m.blocks[0].norm1.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        m(**video())
    assert torch.equal(seen[0], seen[1][:, order])


def test_order_changes_what_a_block_is():
    raster, cube = wan(), wan()
    sla2.convert(raster, keep=0.3)
    sla2.convert(cube, keep=0.3, order="cube")
    outs = [m(**video()).sample for m in (wan(), raster, cube)]
    assert rel(outs[1], outs[0]) > 1e-3 and rel(outs[2], outs[1]) > 1e-3
    set_keep(raster, 1)
    set_keep(cube, 1)
    assert rel(cube(**video()).sample, raster(**video()).sample) < 0.01


def test_copies_checkpointing_and_lengths():
    """Activation checkpointing, with a video of another size between forward and backward; a copy
    of the model has its own order."""
    model = wan()
    sla2.convert(model, keep=0.3, order="cube", alpha="mass")
    want = gradients(model, video())
    twin = copy.deepcopy(model)
    twin.enable_gradient_checkpointing()
    twin.train()
    twin.zero_grad()
    inputs = dict(video(), hidden_states=video()["hidden_states"].requires_grad_())
    out = twin(**inputs).sample
    other = video(frames=3, height=10, width=20)
    assert twin(**other).sample.shape == other["hidden_states"].shape
    model(**other)
    out.square().mean().backward()
    got = out, inputs["hidden_states"].grad, twin.blocks[0].attn1.to_k.weight.grad
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_new_parameters_train():
    model = wan()
    sla2.convert(model, keep=0.3, rows=3)
    model(**video()).sample.square().mean().backward()
    layer = model.blocks[1].attn1.sla2
    assert layer.alpha.logit.shape == (2, 3) and layer.alpha.logit.grad.abs().sum() > 0
    assert layer.router.wq.grad is None
    half = wan().to(torch.bfloat16)
    sla2.convert(half, keep=0.3)
    assert half.blocks[0].attn1.sla2.alpha.logit.dtype == torch.bfloat16


def test_stage_1_in_a_model():
    model = wan()
    sla2.convert(model, keep=0.3, where="blocks.1.*", rows=3)
    weights = {n: p.clone() for n, p in model.named_parameters() if "sla2" not in n}
    batches = [video(seed=s) for s in range(3)]
    (layer,) = sla2.fit(model, batches, steps=5)
    assert layer.name == "blocks.1.attn1.sla2" and max(layer.error) < 1
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)
    assert model.blocks[1].attn1.sla2.keep == 0.3
    assert not torch.equal(model.blocks[1].attn1.sla2.alpha.logit, torch.ones(2, 3))


def test_checkpoints_are_strict(tmp_path):
    model = wan()
    sla2.convert(model, keep=0.3, order="cube")
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key.*sla2"):
        wan().load_state_dict(state)
    twin = wan()
    sla2.convert(twin, keep=0.3, order="cube")
    twin.load_state_dict(state)
    raster = wan()
    sla2.convert(raster, keep=0.3)
    with pytest.raises(RuntimeError, match="block sizes and order"):
        raster.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key.*sla2"):
        twin.load_state_dict(wan().state_dict())
    # What diffusers saves has everything.
    with pytest.warns(UserWarning, match="sla2.load"):
        model.save_pretrained(tmp_path)
    saved = pytest.importorskip("safetensors.torch").load_file(
        tmp_path / "diffusion_pytorch_model.safetensors"
    )
    assert set(saved) == set(state)


def test_fused_projections():
    model = wan()
    sla2.convert(model, keep=0.3)
    want = model(**video()).sample
    model.fuse_qkv_projections()
    assert rel(model(**video()).sample, want) < 1e-3


@pytest.mark.parametrize("pattern", ["*", "*attn*", "blocks.*"])
def test_cross_attention_is_never_converted(pattern):
    model = wan()
    assert sla2.convert(model, where=pattern) == SELF
    assert not any("attn2" in n for n, m in model.named_modules() if isinstance(m, sla2.Attention))


def test_bad_options_leave_the_model_alone():
    model = wan()
    names = set(model.state_dict())
    for changes, error, words in (
        (dict(where="*attn2"), ValueError, "blocks.0.attn1"),
        (dict(where="transformer.*"), ValueError, "blocks.0.attn1"),
        (dict(keep=0), ValueError, "keep"),
        (dict(order="hilbert"), ValueError, "raster"),
        (dict(order="cube", box=(4, 4)), ValueError, "three"),
        (dict(order="cube", alpha="token"), ValueError, "alpha"),
        (dict(causal=True), ValueError, "no video model"),
    ):
        with pytest.raises(error, match=words):
            sla2.convert(model, **changes)
    assert set(model.state_dict()) == names and not model.rope._forward_hooks
    with pytest.raises(NotImplementedError, match="found none"):
        sla2.convert(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Module"):
        sla2.convert("wan")


def test_layers_one_after_the_other():
    model = wan()
    sla2.convert(model, keep=1, where=SELF[0], order="cube")
    with pytest.raises(ValueError, match="converted already"):
        sla2.convert(model, keep=1, where="*attn1", order="cube")
    with pytest.raises(ValueError, match=r"boxes of \(4, 4, 4\)"):
        sla2.convert(model, keep=1, where=SELF[1])
    assert sla2.convert(model, keep=1, where=SELF[1], order="cube") == SELF[1:]
    assert rel(model(**video()).sample, wan()(**video()).sample) < 0.01  # reordered once


def test_masks_and_context_parallelism_are_refused():
    model = wan()
    sla2.convert(model, keep=0.3)
    layer, x = model.blocks[0].attn1, torch.randn(1, 64, 32)
    with pytest.raises(NotImplementedError, match="attention_mask"):
        layer(x, None, torch.ones(1, 64))
    with pytest.raises(NotImplementedError, match="self-attention"):
        layer(x, x)
    layer.processor._parallel_config = object()
    with pytest.raises(NotImplementedError, match="context parallelism"):
        layer(x)


@pytest.mark.parametrize("order", ["raster", "cube"])
def test_saved_and_loaded(tmp_path, order):
    model = wan()
    sla2.convert(model, keep=0.3, order=order, rows=3, alpha="block", block_q=64)
    for name, p in model.named_parameters():
        if "sla2" in name:
            torch.nn.init.normal_(p)
    sla2.save(model, tmp_path)
    twin = sla2.load(type(model), tmp_path)
    assert torch.equal(twin(**video()).sample, model(**video()).sample)
    with pytest.raises(FileNotFoundError, match="sla2.save"):
        sla2.load(type(model), tmp_path / "other")
    with pytest.raises(ValueError, match="sla2.convert"):
        sla2.save(wan(), tmp_path)


def test_save_pretrained_loses_nothing_without_a_word(tmp_path):
    model = wan()
    options = inspect.signature(model.save_pretrained).parameters
    sla2.convert(model, keep=0.3, order="cube")
    assert inspect.signature(model.save_pretrained).parameters == options  # pipelines look
    torch.save(model, tmp_path / "whole.pt")
    copies = [
        model,
        copy.deepcopy(model),
        torch.load(tmp_path / "whole.pt", weights_only=False),
    ]
    for i, each in enumerate(copies):
        for name, p in each.named_parameters():
            if "sla2" in name:
                torch.nn.init.normal_(p)  # its own, not those of the model it was copied from
        with pytest.warns(UserWarning, match=r"sla2.load\(WanTransformer3DModel"):
            each.save_pretrained(tmp_path / str(i))
        twin = sla2.load(type(each), tmp_path / str(i))
        assert torch.equal(twin(**video()).sample, each(**video()).sample)
    sla2.revert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path / "reverted")
        copies[1].save_pretrained(tmp_path / "elsewhere", is_main_process=False)
    assert not (tmp_path / "reverted" / "sla2.json").exists()


@pytest.mark.parametrize("order", ["raster", "cube"])
def test_reverted(order):
    model = wan()
    sla2.convert(model, keep=0.3, order=order)
    model = copy.deepcopy(model)
    assert sla2.revert(model) == SELF
    assert set(model.state_dict()) == set(wan().state_dict())
    assert torch.equal(model(**video()).sample, wan()(**video()).sample)
    assert sla2.convert(model, keep=0.3) == SELF
