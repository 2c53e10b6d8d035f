# SPDX-License-Identifier: Apache-2.0
"""The modules for torchtitan and Megatron-core, on those projects' calling conventions."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import sagebwd
from reference import check, exact, exact_grads, grads_of, qkv, rel, visible
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
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner_attention = torch.nn.Identity()
            self.inner_attention.window_size = (8, 0)

    model = torch.nn.Sequential(Layer(), Layer())
    old = [layer.inner_attention for layer in model]
    undo = torchtitan.convert(model)
    assert all(layer.inner_attention.window_size == (8, 0) for layer in model)
    assert all(isinstance(layer.inner_attention, torchtitan.InnerAttention) for layer in model)
    undo()
    assert [layer.inner_attention for layer in model] == old
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


class ExactDocuments(torch.nn.Module):
    """What torchtitan's inner attention computes, document by document in float32."""

    def forward(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False):
        rows = [t.flatten(0, 1).transpose(0, 1) for t in (q, k, v)]
        ends = attention_masks.cu_seq_q.tolist()
        out = [
            F.scaled_dot_product_attention(
                *(t[:, a:b] for t in rows), is_causal=True, scale=scale, enable_gqa=enable_gqa
            )
            for a, b in zip(ends, ends[1:])
        ]
        return torch.cat(out, 1).transpose(0, 1).view(q.shape)


def test_torchtitan_trains_its_llama():
    """The model of torchtitan itself, packed documents in both rows of the batch."""
    llama3 = pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    from torchtitan.models.common import attention as titan

    torch.manual_seed(0)
    config = llama3.llama3_configs["debugmodel"]("varlen")
    config.layers = config.layers[:2]
    model = config.build()
    model.init_states()
    ids = torch.randint(0, 2048, (2, 40))
    positions = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, 40)
    cu = torch.tensor([0, 15, 40, 55, 80], dtype=torch.int32)
    documents = titan.VarlenMetadata(cu, cu, 25, 25)

    def step():
        model.zero_grad()
        out = model(ids, positions, documents)
        F.cross_entropy(out.flatten(0, 1).float(), ids.flatten()).backward()
        grads = [p.grad.flatten() for n, p in model.named_parameters() if "attention." in n]
        return out.detach(), torch.cat(grads)

    for layer in model.layers.values():
        layer.attention.inner_attention = ExactDocuments()
    want, want_grads = step()
    undo = torchtitan.convert(model)
    got, got_grads = step()
    undo()
    assert 0 < rel(got, want) < 0.03 and 0 < rel(got_grads, want_grads) < 0.06
    assert torch.equal(step()[0], want), "undone"


@pytest.fixture
def megatron(tmp_path):
    pytest.importorskip("megatron.core")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from sagebwd.integrations.megatron import SageDotProductAttention

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    groups = ProcessGroupCollection(tp=dist.group.WORLD)

    def build(kind="causal", **changes):
        config = TransformerConfig(
            **dict(num_layers=1, hidden_size=128, num_attention_heads=4, num_query_groups=2,
                   kv_channels=32,
                   attention_dropout=0.0, hidden_dropout=0.0) | changes
        )  # fmt: skip
        return SageDotProductAttention(config, 1, AttnMaskType[kind], "self", pg_collection=groups)

    yield build
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["causal", "no_mask"])
def test_megatron(megatron, kind):
    q, k, v, dout = qkv(b=2, h=4, hk=2, s=50, d=32)
    want = exact_grads(q, k, v, dout, visible(50, 50, kind == "causal"))
    module = megatron(kind)

    def call(*tensors):
        out = module(*(t.permute(2, 0, 1, 3).contiguous() for t in tensors), None)
        assert out.shape == (50, 2, 128)
        return out.view(50, 2, 4, 32).permute(1, 2, 0, 3)

    for name, a, b in zip(
        ("out", "dq", "dk", "dv"), grads_of(call, q, k, v, dout), (want[0], *want[2:])
    ):
        check(name, a, b)


def test_megatron_packed_and_refusals(megatron):
    from megatron.core.packed_seq_params import PackedSeqParams

    module = megatron("padding_causal")
    q, k = torch.randn(80, 4, 32), torch.randn(80, 2, 32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=50, max_seqlen_kv=50
    )
    out = module(q, k, k, None, packed_seq_params=packed)
    want = sagebwd.attention_varlen(q, k, k, CU, CU, causal=True)
    assert torch.equal(out, want.flatten(1))
    x = torch.randn(8, 1, 4, 32)
    with pytest.raises(NotImplementedError, match="padding masks"):
        module(x, x, x, torch.zeros(1, 1, 8, 8) > 0)
    with pytest.raises(NotImplementedError, match="bias"):
        module(x, x, x, None, attention_bias=x)
    with pytest.raises(NotImplementedError, match="arbitrary"):
        megatron("arbitrary")(x, x, x, None)
    with pytest.raises(NotImplementedError, match="dropout"):
        megatron(attention_dropout=0.1)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "options", [dict(packing=True), dict(padding_free=True, max_length=None), dict()], ids=str
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
