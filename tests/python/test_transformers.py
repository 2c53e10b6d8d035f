# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with attn_implementation="sagebwd" against "sdpa", and LoRA with peft."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from reference import exact, generator, rel, visible  # noqa: E402
from sagebwd.integrations import transformers as sage  # noqa: E402

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
)


@pytest.fixture(autouse=True, scope="module")
def _registered():
    sage.register()
    yield
    sage.unregister()


def build(kind, **changes):
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def pair(kind="Llama", **changes):
    """The same weights under sdpa and under sagebwd."""
    sdpa = build(kind, **changes)
    sdpa.set_attn_implementation("sdpa")
    ours = copy.deepcopy(sdpa)
    ours.set_attn_implementation("sagebwd")
    return sdpa, ours


def tokens(b=2, s=48):
    return torch.randint(0, 97, (b, s), generator=generator(3))


def learnable(step, b=4, s=64):
    """Sequences with a rule (x, x + a, x + 2a, ...), so that the loss falls."""
    g = generator(step)
    start, stride = (
        torch.randint(0, 97, (b, 1), generator=g),
        torch.randint(1, 4, (b, 1), generator=g),
    )
    return (start + stride * torch.arange(s)) % 97


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_training_tracks_sdpa(kind):
    models = pair(kind)
    losses = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        track = []
        for step in range(50):
            batch = learnable(step)
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            track.append(loss.item())
        losses.append(torch.tensor(track))
    sdpa, ours = losses
    assert sdpa[-5:].mean() < 0.8 * sdpa[0], "the model learns something"
    assert not torch.equal(sdpa, ours), "the two ran different attention"
    assert ((ours - sdpa).abs() / sdpa).max() < 0.01


def logits_and_grads(model, **inputs):
    model.zero_grad()
    logits = model(**inputs).logits
    logits.float().square().mean().backward()
    return logits.detach(), torch.cat(
        [p.grad.flatten() for n, p in model.named_parameters() if "self_attn" in n]
    )


def test_padding():
    sdpa, ours = pair()
    ids = tokens(3, 40)
    for side in ("left", "right"):
        mask = torch.ones_like(ids)
        for row, pad in enumerate((0, 7, 30)):
            if pad:
                mask[row, slice(0, pad) if side == "left" else slice(-pad, None)] = 0
        outs = []
        for model in (sdpa, ours):
            model.zero_grad()
            logits = model(ids, attention_mask=mask).logits * mask[..., None]
            logits.square().mean().backward()
            outs.append(
                (logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone())
            )
        for want, got in zip(*outs):
            assert 0 < rel(got, want) < 0.03


def test_padding_contents_do_not_matter():
    _, ours = pair()
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    other = ids.clone()
    other[1, 25:] = 5
    assert torch.equal(
        ours(ids, attention_mask=mask).logits[1, :25],
        ours(other, attention_mask=mask).logits[1, :25],
    )


@pytest.mark.parametrize("b", [1, 2])
def test_packing(b):
    """position_ids that start again separate documents, in every row of the batch."""
    sdpa, ours = pair("Qwen3")
    ids = tokens(b, 60)
    rows = [[17, 43], [60]] if b == 2 else [[17, 30, 13]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    packed = ours(ids, position_ids=positions).logits
    for row, lengths in enumerate(rows):
        start = 0
        for n in lengths:
            alone = ours(ids[row : row + 1, start : start + n]).logits[0]
            got = packed[row, start : start + n]
            # On a GPU the model's own matmuls round differently at another length.
            assert torch.equal(got, alone) if got.device.type == "cpu" else rel(got, alone) < 0.01
            start += n
    # sdpa looks for documents only without a cache
    inputs = dict(input_ids=ids, position_ids=positions, use_cache=False)
    want, want_grads = logits_and_grads(sdpa, **inputs)
    got, got_grads = logits_and_grads(ours, **inputs)
    assert 0 < rel(got, want) < 0.03 and 0 < rel(got_grads, want_grads) < 0.06


def test_packing_by_offsets():
    _, ours = pair()
    ids = tokens(1, 50)
    positions = torch.cat([torch.arange(20), torch.arange(30)])[None]
    cu = torch.tensor([0, 20, 50])
    lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=30, max_length_k=30)
    assert torch.equal(
        ours(ids, position_ids=positions, **lengths).logits,
        ours(ids, position_ids=positions).logits,
    )


def test_sliding_window():
    sdpa, ours = pair("Mistral", sliding_window=16)
    _, full = pair("Mistral", sliding_window=None)
    ids = tokens(2, 60)
    want, want_grads = logits_and_grads(sdpa, input_ids=ids)
    got, got_grads = logits_and_grads(ours, input_ids=ids)
    assert 0 < rel(got, want) < 0.03 and 0 < rel(got_grads, want_grads) < 0.06
    assert rel(full(ids).logits, want) > 0.05, "the window matters here"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache):
    sdpa, ours = pair("Qwen3")
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = dict(
        attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    if cache == "static":
        options |= dict(cache_implementation="static", disable_compile=True)
    got = ours.generate(ids, **options)
    assert got.shape == (2, 24)
    # An untrained model's tokens are near ties: follow sdpa's continuation and compare the logits
    # instead.
    want = sdpa.generate(ids, **options)
    full = torch.ones_like(want)
    full[1, :4] = 0
    a, b = (m(want, attention_mask=full).logits[:, 4:] for m in (ours, sdpa))
    assert 0 < rel(a, b) < 0.03
    step = ours(want, attention_mask=full, use_cache=True)
    more = ours(
        want[:, -1:],
        attention_mask=torch.cat([full, full[:, -1:]], 1),
        past_key_values=step.past_key_values,
    )
    assert torch.isfinite(more.logits).all()


def test_sinks():
    """gpt-oss's learnable sinks, through the gradient of lse."""
    module = torch.nn.Module()
    q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
    sink = torch.randn(2, requires_grad=True)
    call = transformers.AttentionInterface._global_mapping["sagebwd"]
    out, _ = call(module, q, k, v, None, is_causal=True, s_aux=sink)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, sink))
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v, sink)]
    ref, lse = exact(*leaves[:3], visible(40, 40, True))
    ref = (ref * torch.sigmoid(lse - leaves[3].view(1, 2, 1))[..., None]).transpose(1, 2)
    assert rel(out, ref) < 0.03
    for a, b in zip(grads, torch.autograd.grad(ref.square().sum(), leaves)):
        assert rel(a, b) < 0.06


def test_gradient_checkpointing_is_bit_equal():
    _, ours = pair()
    ours.train()
    ids = tokens()
    want = logits_and_grads(ours, input_ids=ids)
    ours.gradient_checkpointing_enable()
    got = logits_and_grads(ours, input_ids=ids)
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_exact_layers():
    sdpa, _ = pair()
    ids = tokens()
    want = sdpa(ids).logits
    errors = []
    for layers in ((), (0,), (0, 1)):
        sage.register("sage-test", exact_layers=layers)
        model = copy.deepcopy(sdpa)
        model.set_attn_implementation("sage-test")
        errors.append(rel(model(ids).logits, want))
    sage.unregister("sage-test")
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-5


def test_diagnose_of_a_model():
    import sagebwd

    for model in pair("Qwen3"):
        ids = tokens()
        report = sagebwd.diagnose(model, dict(input_ids=ids, labels=ids), file=None)
        assert [layer.verdict for layer in report.layers] == ["fine", "fine"]


def test_unregister():
    sage.register("sage-once")
    model = build("Llama")
    model.set_attn_implementation("sage-once")
    sage.unregister("sage-once")
    with pytest.raises(Exception):
        build("Llama").set_attn_implementation("sage-once")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lora(dtype):
    peft = pytest.importorskip("peft")
    base = build("Llama").to(dtype)
    base.set_attn_implementation("sagebwd")
    model = peft.get_peft_model(
        base,
        peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(8):
        batch = learnable(0)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, p in model.named_parameters():
        if "lora_B" in name:
            assert p.grad is not None and p.grad.abs().sum() > 0, name
    assert losses[-1] < losses[0]
