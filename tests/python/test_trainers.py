# SPDX-License-Identifier: Apache-2.0
"""The module for torchtitan on its calling convention, without torchtitan; TRL's trainer."""

from typing import NamedTuple

import pytest
import torch

import sagebwd
from reference import check, exact, qkv, rel, visible
from sagebwd.integrations import torchtitan


class VarlenMetadata(NamedTuple):
    """Fields of torchtitan's type of this name."""

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int


CU = torch.tensor([0, 30, 80], dtype=torch.int32)


@pytest.mark.parametrize("keyword", ["attention_masks", "attention_metadata"])
@pytest.mark.parametrize("rows", [1, 2, None])
def test_torchtitan_packed(keyword, rows):
    q, k, v = torch.randn(80, 4, 32), torch.randn(80, 2, 32), torch.randn(80, 2, 32)
    module = torchtitan.InnerAttention(window_size=(16, 0))
    shaped = [t if rows is None else t.view(rows, -1, *t.shape[1:]) for t in (q, k, v)]
    out = module(*shaped, **{keyword: VarlenMetadata(CU, CU, 50, 50)}, enable_gqa=True)
    assert out.shape == shaped[0].shape
    want = sagebwd.attention_varlen(q, k, v, CU, CU, window_size=(16, 0))
    assert torch.equal(out.reshape(80, 4, 32), want)


def test_torchtitan_dense_and_sinks():
    q, k, v, _ = qkv(b=2, s=40, d=32)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    sink = torch.randn(2)
    out = torchtitan.InnerAttention()(
        *turned, out_transform=lambda o, lse: o * torch.sigmoid(lse - sink)[..., None]
    )
    want, lse = exact(q, k, v, visible(40, 40, True))
    check("out", out.transpose(1, 2), want * torch.sigmoid(lse - sink.view(1, 2, 1))[..., None])
    full = torchtitan.InnerAttention()(*turned, is_causal=False)
    check("out", full.transpose(1, 2), exact(q, k, v)[0])


def test_torchtitan_convert_and_refusals():
    with pytest.raises(ValueError, match="no inner_attention"):
        torchtitan.convert(torch.nn.Linear(2, 2))
    q, k = torch.randn(1, 8, 4, 32), torch.randn(1, 8, 2, 32)
    module = torchtitan.InnerAttention()
    with pytest.raises(NotImplementedError, match="object"):
        module(q, q, q, attention_masks=object())
    with pytest.raises(ValueError, match="enable_gqa"):
        module(q, k, k)
    with pytest.raises(TypeError):
        module(q, q, q, score_mod=None)


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "options",
    [
        dict(packing=True),
        pytest.param(dict(padding_free=True, max_length=None), marks=pytest.mark.long),
        pytest.param(dict(), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_trl(options, tmp_path, monkeypatch):
    """TRL's trainer, packed, without padding and padded, against eager attention."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models
    from transformers_tiny import build, tiny

    from sagebwd.integrations import transformers as sage

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", unk_token="t0", eos_token="t1"
    )
    rows = [{"input_ids": torch.randint(3, 19, (n,)).tolist()} for n in (5, 17, 9, 12, 6, 14)]
    arguments = dict(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, max_length=40,
        report_to=[], logging_steps=1, use_cpu=True, save_strategy="no", learning_rate=1e-3,
        bf16=False, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    sage.register("sage-trl")
    losses = {}
    for name in ("eager", "sage-trl"):
        model = build(transformers.LlamaForCausalLM, tiny(transformers.LlamaConfig))
        model.set_attn_implementation(name)
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(**arguments | options),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
        losses[name] = torch.tensor(
            [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        )
    sage.unregister("sage-trl")
    want, got = losses.values()
    assert len(want) == 3 and not torch.equal(got, want), "two kinds of attention ran"
    assert rel(got, want) < 2e-3
