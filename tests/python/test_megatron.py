# SPDX-License-Identifier: Apache-2.0
"""The hook for Megatron-core against Megatron's own DotProductAttention, option by option."""

import contextlib
import random

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import sagebwd
from reference import check, exact_grads, grads_of, qkv, rel, visible

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]

S, B, H, D = 64, 2, 4, 32
CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]  # True: hidden
DOCUMENT = torch.arange(S) // 16
DOCUMENTS = CAUSAL | (DOCUMENT[:, None] != DOCUMENT)[None, None]  # reset_attention_mask
PADDING = (torch.arange(S) >= torch.tensor([[S], [40]]))[:, None, None]  # [b, 1, 1, s]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """build(own, kind, layer, **config): an attention module on one rank, without CUDA."""
    import megatron.core.tensor_parallel as tensor_parallel
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from sagebwd.integrations.megatron import SageDotProductAttention

    class NoTracker:
        def fork(self, *_):
            return contextlib.nullcontext()

    class OnCpu(TorchFunctionMode):
        """Megatron makes its masks on the GPU."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    store = tmp_path_factory.mktemp("megatron") / "store"
    with pytest.MonkeyPatch.context() as patch, OnCpu():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda *a, **k: NoTracker())
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)

        def make(own, kind="causal", layer=1, arguments={}, **changes):
            config = TransformerConfig(
                **dict(num_layers=8, hidden_size=H * D, num_attention_heads=H, kv_channels=D,
                       attention_dropout=0.0, masked_softmax_fusion=False) | changes
            )  # fmt: skip
            kind_class = DotProductAttention if own else SageDotProductAttention
            torch.manual_seed(3)
            return kind_class(config, layer, AttnMaskType[kind], "self", **arguments)

        yield make
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _tensors(groups=H, dtype=torch.float32):
    torch.manual_seed(0)
    make = lambda heads: (torch.randn(S, B, heads, D) * 1.5).to(dtype)
    return make(H), make(groups), make(groups), torch.randn(S, B, H * D).to(dtype)


SAME = {
    "causal": dict(mask=CAUSAL),
    "causal without a mask": dict(mask=None),
    "documents": dict(mask=DOCUMENTS),
    "documents of each row": dict(mask=torch.cat([CAUSAL, DOCUMENTS])),
    "layer 8": dict(mask=CAUSAL, layer=8),
    "layer scaling, layer 1": dict(mask=CAUSAL, apply_query_key_layer_scaling=True),
    "layer scaling, layer 2": dict(mask=CAUSAL, apply_query_key_layer_scaling=True, layer=2),
    "layer scaling, layer 8": dict(mask=CAUSAL, apply_query_key_layer_scaling=True, layer=8),
    "layer scaling, scale": dict(
        mask=CAUSAL, apply_query_key_layer_scaling=True, layer=4, arguments={"softmax_scale": 0.1}
    ),
    "softmax_scale": dict(mask=CAUSAL, arguments={"softmax_scale": 0.3}),
    "dropout of the call": dict(
        mask=CAUSAL, attention_dropout=0.1, arguments={"attention_dropout": 0.0}
    ),
    "cp_comm_type": dict(mask=CAUSAL, arguments={"cp_comm_type": "p2p"}),
    "groups": dict(mask=CAUSAL, groups=2, num_query_groups=2),
    "window": dict(mask=None, window_size=(15, 0)),
    "window, causal mask": dict(mask=CAUSAL, window_size=(15, 0)),
    "window on some layers, off": dict(
        mask=CAUSAL, window_size=(15, 0), window_attn_skip_freq=2, layer=2
    ),
    "window on some layers, on": dict(
        mask=CAUSAL, window_size=(15, 0), window_attn_skip_freq=2, layer=1
    ),
    "window on both sides": dict(mask=None, kind="no_mask", window_size=(7, 5)),
    "no_mask": dict(mask=None, kind="no_mask"),
    "padding": dict(mask=PADDING, kind="padding"),
    "padding without a mask": dict(mask=None, kind="padding"),
    "arbitrary": dict(mask=DOCUMENTS, kind="arbitrary"),
    "off-by-one": dict(mask=CAUSAL, softmax_type="off-by-one"),
    "off-by-one, documents": dict(mask=DOCUMENTS, softmax_type="off-by-one"),
    "learnable": dict(mask=CAUSAL, softmax_type="learnable"),
    "bf16": dict(mask=CAUSAL, bf16=True, params_dtype=torch.bfloat16),
    "sequence_parallel off, deterministic": dict(mask=CAUSAL, deterministic_mode=True),
}


@pytest.mark.parametrize("case", SAME)
def test_equals_megatrons_own(build, case):
    options = dict(SAME[case])
    mask, groups = options.pop("mask"), options.pop("groups", H)
    dtype = torch.bfloat16 if options.get("bf16") else torch.float32
    q, k, v, dout = _tensors(groups, dtype)
    modules = [build(own, **options) for own in (True, False)]
    for module in modules:
        if options.get("softmax_type") == "learnable":
            with torch.no_grad():
                module.softmax_offset.copy_(torch.tensor([-1.0, 0.5, 2.0, 4.0]))
    want, got = (grads_of(lambda *t: m(*t, mask), q, k, v, dout) for m in modules)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        check(f"{case}: {name}", a, b)
    assert rel(got[0], want[0]) > 1e-5, "INT8 ran"


MASKS = {
    "none": lambda b, s, sk: None,
    "causal": lambda b, s, sk: ~visible(s, sk, True)[None, None],
    "documents": lambda b, s, sk: ~(visible(s, sk, True) & _same_document(b, s, sk)),
    "apart": lambda b, s, sk: ~_same_document(b, s, sk),  # documents that see ahead
    "padding": lambda b, s, sk: _after(torch.randint(1, sk + 1, (b, 1)), sk),
    "random": lambda b, s, sk: (torch.rand(b, 1, s, sk) > 0.7) & (torch.arange(sk) > 0),
    "all": lambda b, s, sk: torch.zeros(b, 1, s, sk, dtype=torch.bool),
}


def _after(lengths, sk):
    return (torch.arange(sk) >= lengths)[:, None, None]


def _same_document(b, s, sk):
    """[b, 1, s, sk]; every document has queries and keys."""
    piece = torch.randint(2, 9, (b, 1))
    number = lambda n: torch.arange(n) * piece // n
    return (number(s)[:, :, None] == number(sk)[:, None])[:, None]


def _drawn(choose):
    """Options of one random layer: (what is built, shapes, the kind of mask)."""
    dtype = choose(["fp32", "bf16", "fp16"])
    heads, groups = choose([(4, 4), (4, 2), (6, 1), (2, 2)])
    d = choose([16, 20, 32, 40])
    layer, s = choose([1, 2, 5]), choose([1, 16, 33, 70])
    built = dict(
        kind=choose(["causal", "causal", "no_mask", "padding", "arbitrary"]),
        layer=layer,
        arguments=choose([{}, {}, {"softmax_scale": 0.11}]),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=d,
        hidden_size=heads * d,
        softmax_type=choose(["vanilla", "off-by-one", "learnable"]),
        window_size=choose([None, None, (9, 0), (4, 7)]),
        window_attn_skip_freq=choose([None, 2, [1, 0, 1, 0, 0, 1, 1, 1]]),
        apply_query_key_layer_scaling=choose([False, True]),
        attention_softmax_in_fp32=True,
        sequence_parallel=False,
        deterministic_mode=choose([False, True]),
    )
    if dtype != "fp32":
        built[dtype] = True
    built["params_dtype"] = DTYPES[dtype]
    return built, (choose([1, 3]), s, choose([s, s, s + 29])), choose(list(MASKS))


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _must_run(built, s, sk, mask):
    """Options of a usual model, which may not be refused."""
    plain = not built["window_size"] and mask in ("causal", "documents")
    window = built["window_size"] != (4, 7) and mask in ("none", "causal")
    return built["kind"] == "causal" and s == sk and (plain or window)


@pytest.mark.parametrize("seed", range(4))
def test_random_options(build, seed):
    """Whatever is not refused is what Megatron's own class computes, gradients included."""
    draw = random.Random(seed)
    ran = 0
    for _ in range(40):
        built, (b, s, sk), name = _drawn(draw.choice)
        torch.manual_seed(draw.randrange(1000))
        mask = MASKS[name](b, s, sk)
        case = f"{built}, {b} x {s} x {sk}, mask {name}"
        d, heads, dtype = built["kv_channels"], built["num_attention_heads"], built["params_dtype"]
        make = lambda n, h: torch.randn(n, b, h, d).to(dtype)
        q, k, v = make(s, heads), make(sk, g := built["num_query_groups"]), make(sk, g)
        dout = torch.randn(s, b, heads * d).to(dtype)
        try:
            new = build(False, **built)
            new(q, k, v, mask)
        except (NotImplementedError, ValueError):
            assert not _must_run(built, s, sk, name), case
            continue
        own = build(True, **built)
        if built["softmax_type"] == "learnable":
            with torch.no_grad():
                new.softmax_offset.normal_()
                own.softmax_offset.copy_(new.softmax_offset)
        want, got = (grads_of(lambda *t: m(*t, mask), q, k, v, dout) for m in (own, new))
        for what, a, e in zip(("out", "dq", "dk", "dv"), got, want):
            if e.norm() > 1e-3 * dout.norm():  # dq and dk of one visible key are rounding errors
                check(f"{case}: {what}", a, e, 0.1)
        ran += 1
    assert ran >= 10


def test_gradient_of_the_learnable_offset(build):
    q, k, v, dout = _tensors()
    grads = []
    for own in (True, False):
        module = build(own, softmax_type="learnable")
        module(q, k, v, CAUSAL).backward(dout)
        grads.append(module.softmax_offset.grad)
        assert list(module.state_dict()) == ["softmax_offset"]
    check("softmax_offset", grads[1], grads[0])


def test_types_of_transformer_engine(build):
    """Megatron leaves these mask types to Transformer Engine: against float64."""
    q, k, v, dout = qkv(b=B, h=H, s=S, d=D)
    sbhd = lambda t: t.permute(2, 0, 1, 3).contiguous()

    def compare(module, mask, tensors, dout, seen):
        sq, dv = tensors[0].shape[2], tensors[2].shape[-1]

        def call(*leaves):
            out = module(*map(sbhd, leaves), mask)
            return out.view(sq, B, H, dv).permute(1, 2, 0, 3)

        want = exact_grads(*tensors, dout, seen)
        got = grads_of(call, *tensors, dout)
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
            check(name, a, b)

    seen = ~PADDING & visible(S, S, True)
    compare(build(False, "padding_causal"), PADDING, (q, k, v), dout, seen)
    short = q[:, :, -20:]
    below = visible(20, S, True)
    compare(build(False, "causal_bottom_right"), None, (short, k, v), dout[:, :, -20:], below)
    # Latent attention: 40 channels of q and k, 24 of v.
    wide = [torch.randn(B, H, S, d) for d in (40, 40, 24, 24)]
    latent = build(False, arguments=dict(k_channels=40, v_channels=24))
    compare(latent, CAUSAL, wide[:3], wide[3], visible(S, S, True))


def _packed(**changes):
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor([0, 30, 80], dtype=torch.int32)
    return PackedSeqParams(
        **dict(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=50,
               max_seqlen_kv=50) | changes
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["causal", "padding_causal", "no_mask", "padding"])
def test_packed(build, kind):
    q, k = torch.randn(80, H, D), torch.randn(80, H, D)
    packed = _packed()
    packed.cu_seqlens_q_padded = packed.cu_seqlens_q
    out = build(False, kind)(q, k, k, None, packed_seq_params=packed)
    cu = packed.cu_seqlens_q
    want = sagebwd.attention_varlen(q, k, k, cu, cu, causal="causal" in kind)
    assert torch.equal(out, want.flatten(1))
    sunk = build(False, kind, softmax_type="off-by-one")(q, k, k, None, packed_seq_params=packed)
    _, lse = sagebwd.attention_varlen(q, k, k, cu, cu, causal="causal" in kind, return_lse=True)
    torch.testing.assert_close(sunk, (want * lse.sigmoid().T[..., None]).flatten(1))


REFUSED_CONFIGS = {
    "attention_dropout=0.0": dict(attention_dropout=0.1),
    "context_parallel_size=1": dict(context_parallel_size=2),
    "second number to 0": dict(window_size=(15, 3)),
    "qk_clip=False": dict(qk_clip=True),
    "log_max_attention_logit=False": dict(log_max_attention_logit=True),
    "fp8_dot_product_attention=False": dict(fp8_dot_product_attention=True),
}


@pytest.mark.parametrize("remedy", REFUSED_CONFIGS)
def test_refused_configs(build, remedy):
    with pytest.raises(NotImplementedError, match=remedy):
        build(False, **REFUSED_CONFIGS[remedy])


def test_refused_calls(build):
    from megatron.core.transformer.enums import AttnMaskType

    q, k, v, _ = _tensors()
    module = build(False)
    no = lambda match: pytest.raises(NotImplementedError, match=match)
    with no("rotary"):
        module(q, k, v, None, attention_bias=q)
    with no("padding_causal"):
        module(q, k, v, PADDING)
    with no("bool"):
        module(q, k, v, CAUSAL.float())
    with no("bool"):
        module(q, k, v, (CAUSAL, CAUSAL))
    with no("causal_bottom_right"):
        module(q[:20], k, v, None)
    with no("qkv_format='thd'"):
        build(False, window_size=(15, 0))(q, k, v, DOCUMENTS)
    with no("flex_attention"):
        module(q, k, v, torch.rand(B, 1, S, S) > 0.5, attn_mask_type=AttnMaskType.arbitrary)
    with pytest.raises(ValueError, match="expected a mask"):
        module(q, k, v, None, attn_mask_type=AttnMaskType.arbitrary)
    t = torch.randn(80, H, D)
    for changes, match in (
        (dict(qkv_format="sbhd"), "'thd'"),
        (dict(cu_seqlens_q_padded=torch.tensor([0, 32, 80]).int()), "the padding"),
        (dict(pad_between_seqs=True), "the padding"),
        (dict(local_cp_size=2), "local_cp_size"),
    ):
        with no(match):
            module(t, t, t, None, packed_seq_params=_packed(**changes))
    with no("attention_mask=None"):
        module(t, t, t, CAUSAL, packed_seq_params=_packed())


def test_a_changed_mask_is_read_again(build):
    q, k, v, _ = _tensors()
    module, mask = build(False), CAUSAL.clone()
    plain = module(q, k, v, mask)
    mask.copy_(DOCUMENTS)
    assert torch.equal(module(q, k, v, mask), module(q, k, v, DOCUMENTS.clone()))
    assert rel(module(q, k, v, mask), plain) > 0.1


# --- in Megatron's models -------------------------------------------------------------------------


@pytest.fixture
def model(build, monkeypatch):
    """model(hooked, latent, **config): Megatron's GPTModel of two layers, the same weights each
    time."""
    import megatron.core.tensor_parallel.random as tensor_parallel_random
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from sagebwd.integrations.megatron import SageDotProductAttention

    monkeypatch.setattr(torch.Tensor, "cuda", lambda t, *a, **k: t)
    monkeypatch.setattr(
        tensor_parallel_random, "_get_all_rng_states", lambda *a, **k: (torch.get_rng_state(),) * 3
    )
    monkeypatch.setattr(tensor_parallel_random, "_set_all_rng_states", lambda *a, **k: None)

    def make(hooked=True, latent=False, **changes):
        torch.manual_seed(0)
        spec = get_gpt_layer_local_spec(multi_latent_attention=latent)
        if hooked:
            spec.submodules.self_attention.submodules.core_attention = SageDotProductAttention
        options = dict(
            num_layers=2, hidden_size=128, num_attention_heads=4, attention_dropout=0.0,
            hidden_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=False,
            gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        )  # fmt: skip
        if latent:
            options |= dict(q_lora_rank=32, kv_lora_rank=32, qk_head_dim=32, v_head_dim=24)
            options |= dict(qk_pos_emb_head_dim=16, rope_type="rope", multi_latent_attention=True)
        else:
            options |= dict(num_query_groups=2, kv_channels=32, apply_rope_fusion=False)
        config = (MLATransformerConfig if latent else TransformerConfig)(**options | changes)
        return GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=128, max_sequence_length=64,
            position_embedding_type="rope", parallel_output=False,
        )  # fmt: skip

    return make


def _step(model, mask=None):
    """(logits, gradients) of a training step."""
    ids = torch.randint(0, 128, (2, 48), generator=torch.Generator().manual_seed(1))
    mask = CAUSAL[..., :48, :48] if mask is None else mask
    out = model(ids, torch.arange(48).expand(2, 48), mask)
    torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    grads = [p.grad.flatten() for _, p in model.named_parameters() if p.grad is not None]
    return out.detach(), torch.cat(grads)


FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn"])


@pytest.mark.parametrize(
    "options",
    [{}, FULL, SELECTIVE, dict(apply_query_key_layer_scaling=True), dict(window_size=(15, 0))],
    ids=lambda options: " ".join(map(str, options.values())) or "plain",
)
def test_model(model, options):
    (want, want_grads), (got, grads) = (_step(model(h, **options)) for h in (False, True))
    check("logits", got, want, 0.02)
    check("gradients", grads, want_grads, 0.03)
    assert not torch.equal(got, want), "INT8 ran"


def test_model_with_documents(model):
    mask = DOCUMENTS[..., :48, :48]
    (want, want_grads), (got, grads) = (_step(model(h), mask) for h in (False, True))
    check("logits", got, want, 0.02)
    check("gradients", grads, want_grads, 0.03)


@pytest.mark.parametrize("latent", [False, True])
def test_packed_model(model, latent):
    """Packed documents are what they are alone. Latent attention pads its packed values."""
    from megatron.core.packed_seq_params import PackedSeqParams

    whole = model(latent=latent)
    ids, places = torch.randint(0, 128, (1, 48)), [torch.arange(20), torch.arange(28)]
    cu = torch.tensor([0, 20, 48], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=28, max_seqlen_kv=28
    )
    got = whole(ids, torch.cat(places)[None], None, packed_seq_params=packed)
    alone = [whole(i, p[None], None) for i, p in zip(ids.split([20, 28], 1), places)]
    check("logits", got, torch.cat(alone, 1), 1e-4)
    assert torch.isfinite(_step(whole)[1]).all()
