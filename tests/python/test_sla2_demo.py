# SPDX-License-Identifier: Apache-2.0
"""python -m sagebwd.sla2.demo at toy size: the clips, the model's tokens, the page."""

import json
import re
import zlib

import pytest
import torch

import sagebwd
from reference import rel
from sagebwd.recipe import MATMULS
from sagebwd.sla2 import Attention
from sagebwd.sla2.demo import summary
from sagebwd.sla2.demo.__main__ import main
from sagebwd.sla2.demo.arms import ARMS, make_arm
from sagebwd.sla2.demo.clips import clips
from sagebwd.sla2.demo.model import Model, Size
from sagebwd.sla2.demo.pictures import png
from sagebwd.sla2.demo.sixteen_bit import sixteen_bit_attention
from sagebwd.sla2.demo.train import OutOfTime, Plan, noisy, start, train

pytestmark = pytest.mark.cpu_only

SIZE = Size(frames=4, pixels=32, layers=1, heads=1, head_dim=16)
TOY = "--frames 4 --pixels 32 --layers 1 --heads 1 --steps 2 --tune 2 --fit 2 --measured 1".split()


def test_clips_keep_the_ground_and_move_the_discs():
    video = clips(3, 6, 32, torch.Generator().manual_seed(1))
    assert video.shape == (3, 3, 6, 32, 32) and video.abs().max() <= 1
    assert torch.equal(video, clips(3, 6, 32, torch.Generator().manual_seed(1)))
    changed = (video[:, :, 1:] != video[:, :, :1]).any(1).float().mean((1, 2, 3))
    assert ((changed > 0.01) & (changed < 0.7)).all()


def test_given_frames_have_no_noise():
    video = clips(1, 4, 32, torch.Generator().manual_seed(1))
    x, target = noisy(video, torch.tensor([0.5]), 2, torch.Generator().manual_seed(2))
    assert torch.equal(x[:, :, :2], video[:, :, :2])
    assert torch.allclose(x[:, :, 2:] - 0.5 * target[:, :, 2:], video[:, :, 2:], atol=1e-6)


def test_patches_are_boxes_and_come_back():
    model = Model(SIZE)
    video = torch.randn(2, 3, 4, 32, 32)
    patches = model.patches(video)
    assert patches.shape == (2, 256, 48) and torch.equal(model.video(patches), video)
    box = video[0, :, :4, :16, :16].reshape(3, 4, 4, 4, 4, 4).permute(1, 2, 4, 0, 3, 5)
    assert torch.equal(patches[0, :64], box.reshape(64, 48))


def test_arms_begin_with_the_same_weights():
    model = Model(SIZE)
    torch.nn.init.normal_(model.outward.weight)
    args = torch.randn(1, 3, 4, 32, 32), torch.tensor([0.5])
    sparse, first, sla2, half = (
        make_arm(n, model, 0.25)(*args) for n in ("sparse", "v1", "sla2", "sla2-16bit")
    )
    # The projection of SLA starts at 0, so both are the same; neither is full attention.
    assert torch.allclose(sparse, first, atol=1e-5)
    assert rel(sparse, model(*args)) > 1e-3 and rel(sparse, sla2) > 1e-3
    assert rel(half, sla2) < 0.01 and not torch.equal(half, sla2)
    arm = make_arm("sparse", model, 0.25)
    assert not any(p.requires_grad for n, p in arm.named_parameters() if ".alpha." in n)
    assert all(m.keep == 0.25 for m in arm.modules() if isinstance(m, Attention))
    assert all(m.keep == 1 for m in model.modules() if isinstance(m, Attention))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_pytorch_over_lists(dtype):
    """The arm that INT8 is compared with is block-sparse attention, with its gradients."""
    tensors = [torch.randn(2, 512, 3, 32, dtype=dtype).requires_grad_() for _ in range(3)]
    lists = sagebwd.BlockLists.top_k(torch.randn(2, 3, 4, 8), k=3)
    exact = sagebwd.Recipe(high_precision=tuple(MATMULS))
    dout = torch.randn(2, 512, 3, 32, dtype=dtype)
    results = []
    for out in (
        sixteen_bit_attention(*tensors, lists),
        sagebwd.attention(*tensors, blocks=lists, recipe=exact),
    ):
        results.append((out, *torch.autograd.grad(out, tensors, dout)))
    for got, want in zip(*results):
        assert rel(got, want) < (1e-5 if dtype == torch.float32 else 0.01)


def test_pictures_are_png():
    data = png(torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    start = data.index(b"IDAT") + 4
    length = int.from_bytes(data[start - 8 : start - 4], "big")
    rows = zlib.decompress(data[start : start + length])
    assert rows == b"\0" + bytes(range(12)) + b"\0" + bytes(range(12, 24))


@pytest.mark.slow
def test_the_page(tmp_path, capsys):
    kinds = list(ARMS)
    options = [*TOY, "--keep", "0.5,0.25", "--seed", "0,1", "--arms", ",".join(kinds)]
    assert main([*options, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "sla2.html").read_text()
    record = json.loads((tmp_path / "sla2.json").read_text())
    assert record["tokens"] == 256 and record["finished"] == "22 of 22 arms"
    assert [run["arm"] for run in record["runs"]][:11] == ["full", *kinds[1:], *kinds[1:]]
    assert list(record["summary"]) == ["0.5", "0.25"]
    assert all(list(arms) == kinds for arms in record["summary"].values())
    # For each share, a clip with and without noise and six arms; one head's blocks and its view.
    assert page.count("<img") == 2 * 8 + 2
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page)
    assert "256 tokens" in page and "blocks.0, head 0" in page
    # The arm with 16-bit products has the router of the other, and tells it from identity.
    saved = lambda kind: torch.load(tmp_path / f"arms/{kind}_keep0.25_seed0.pt")["fitted"]
    same = lambda a, b: all(torch.equal(saved(a)[n], saved(b)[n]) for n in saved(a))
    assert same("sla2", "sla2-16bit") and len(saved("sla2")) == 3
    capsys.readouterr()
    summary.main([str(tmp_path / "sla2.json")])
    assert "| 25 % seen | loss before |" in capsys.readouterr().out


@pytest.mark.slow
def test_an_experiment_goes_on(tmp_path, capsys):
    """A call that was stopped while it trained or between arms gives what one call gives."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*TOY, "--steps", "25", "--arms", "full,sla2", "--keep", "0.5"]
    assert main([*options, "--out", str(whole)]) == 0
    resumed = [*options, "--out", str(parts), "--resume"]
    # Without any time every call takes ten steps, and no arm begins.
    for limit in ("0", "0", "0"):
        assert main([*resumed, "--limit", limit]) == 5
    assert (parts / "start.pt").exists() and not (parts / "unfinished.pt").exists()
    assert not list(parts.glob("arms/*.json"))
    assert main([*resumed, "--limit", "600"]) == 0
    runs = lambda folder: json.loads((folder / "sla2.json").read_text())["runs"]
    for a, b in zip(runs(whole), runs(parts)):
        assert a["before"] == b["before"] and a["losses"] == b["losses"], a["arm"]
    # A finished one trains nothing again; a change of settings is refused.
    files = {f: f.stat().st_mtime_ns for f in parts.glob("arms/*")}
    assert main(resumed) == 0 and len(files) == 4
    assert files == {f: f.stat().st_mtime_ns for f in parts.glob("arms/*")}
    with pytest.raises(SystemExit):
        main([*resumed, "--lr", "1"])
    assert "another lr" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--arms", "dense"])


def test_a_killed_training_goes_on_from_its_file(tmp_path):
    plan = Plan(20, 1, 1e-3)
    losses = lambda **options: train(Model(SIZE), plan, **options)[0]
    torch.manual_seed(3)
    want = losses()
    torch.manual_seed(3)
    with pytest.raises(OutOfTime):
        losses(file=tmp_path / "part.pt", until=0)
    assert losses(file=tmp_path / "part.pt") == want
    assert torch.equal(
        start(SIZE, plan, "cpu", tmp_path / "a.pt").inward.weight,
        start(SIZE, plan, "cpu", tmp_path / "a.pt").inward.weight,
    )


def runs_of(losses, seeds=(0, 1, 2), spread=0.001):
    """Runs with these final losses, a little off for each seed."""
    return [
        dict(
            arm=arm, keep=1 if arm == "full" else 0.1, seed=seed, step_seconds=0.1,
            before=dict(loss=2 * loss, psnr=20.0),
            after=dict(loss=loss + spread * (seed - 1), psnr=21.0),
        )
        for arm, loss in losses.items()
        for seed in seeds
    ]  # fmt: skip


GOOD = {"full": 0.2, "sparse": 0.3, "v1": 0.29, "identity": 0.28, "sla2": 0.26}
GOOD["sla2-16bit"] = 0.2605


def test_what_an_experiment_has_to_show():
    found = summary.summary(runs_of(GOOD))["0.1"]
    assert found["full"]["loss after"] == pytest.approx([0.2, 0.001])
    assert found["sla2"]["loss before"] == pytest.approx([0.52, 0.0])
    assert "wins back 20 %" in summary.verdict("0.1", found)
    assert "40 % after" in summary.verdict("0.1", found)
    results = lambda losses, **o: [c["passed"] for c in summary.checks(runs_of(losses, **o))]
    # Three steps of the order; 40 % before training, 15 % after; INT8 against 16 bit.
    assert results(GOOD) == [True, True, True, False, True, True]
    assert results(GOOD, spread=0.015) == [False, False, True, False, True, True]
    assert results(GOOD | {"sla2-16bit": 0.25})[-1] is False
    assert results(GOOD, seeds=(0,)) == []  # one seed has no scatter
    assert "costs nothing" in summary.verdict(
        "0.1", summary.summary(runs_of(GOOD | {"sparse": 0.1}))["0.1"]
    )
