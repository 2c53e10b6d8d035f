# SPDX-License-Identifier: Apache-2.0
"""python -m sagebwd.sla2.demo at toy size: the clips, the model's tokens, the page."""

import json
import zlib

import pytest
import torch

from sagebwd.sla2 import Attention
from sagebwd.sla2.demo import summary
from sagebwd.sla2.demo.__main__ import main
from sagebwd.sla2.demo.arms import make_arm
from sagebwd.sla2.demo.clips import clips
from sagebwd.sla2.demo.model import Model, Size
from sagebwd.sla2.demo.page import verdict
from sagebwd.sla2.demo.pictures import png
from sagebwd.sla2.demo.train import noisy

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


def test_sparse_alone_has_no_linear_branch():
    model = Model(SIZE)
    torch.nn.init.normal_(model.outward.weight)
    args = torch.randn(1, 3, 4, 32, 32), torch.tensor([0.5])
    sparse, first = (make_arm(n, model, 0.25, (), 0)[0] for n in ("sparse", "v1"))
    # The projection of SLA starts at 0, so both are the same; neither is full attention.
    assert torch.allclose(sparse(*args), first(*args), atol=1e-5)
    assert not torch.allclose(sparse(*args), model(*args), atol=1e-3)
    assert all(m.keep == 0.25 for m in sparse.modules() if isinstance(m, Attention))
    assert all(m.keep == 1 for m in model.modules() if isinstance(m, Attention))


def test_pictures_are_png():
    data = png(torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    start = data.index(b"IDAT") + 4
    length = int.from_bytes(data[start - 8 : start - 4], "big")
    rows = zlib.decompress(data[start : start + length])
    assert rows == b"\0" + bytes(range(12)) + b"\0" + bytes(range(12, 24))


def test_the_page(tmp_path, capsys):
    arms = "full,sparse,v1,identity,sla2"
    main([*TOY, "--keep", "0.25", "--arms", arms, "--out", str(tmp_path)])
    page = (tmp_path / "sla2.html").read_text()
    record = json.loads((tmp_path / "sla2.json").read_text())
    assert list(record["arms"]) == arms.split(",") and record["tokens"] == 256
    assert page.count("<img") == 2 + 5 + 1 + 1  # clips, one head's blocks, what one block sees
    assert "256 tokens" in page and "blocks.0, head 0" in page and "nan" not in page
    summary.main([str(tmp_path / "sla2.json")])
    assert "| 25 % seen | loss before |" in capsys.readouterr().out


def test_a_start_is_used_again(tmp_path):
    start = tmp_path / "start.pt"
    for _ in range(2):
        main([*TOY, "--arms", "full", "--start", str(start), "--out", str(tmp_path)])
        record = json.loads((tmp_path / "sla2.json").read_text())["arms"]["full"]
        before, saved = start.stat().st_mtime_ns, record["before"]
    main([*TOY, "--arms", "full", "--start", str(start), "--seed", "5", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "sla2.json").read_text())["arms"]["full"]
    assert start.stat().st_mtime_ns == before and record["before"] == saved
    with pytest.raises(SystemExit):
        main(["--arms", "dense"])


def test_the_verdict():
    arm = lambda before, after: {"before": {"loss": before}, "after": {"loss": after}}
    arms = {"full": arm(0.2, 0.1), "sparse": arm(0.5, 0.3), "sla2": arm(0.3, 0.2)}
    assert "50 % before training and 50 % after" in verdict(arms)
    assert "costs nothing" in verdict(arms | {"sparse": arm(0.1, 0.1)})
