# SPDX-License-Identifier: Apache-2.0
"""Masks, caches and refusals of the transformers hook, against eager attention. Matmuls stay in
floating point, so that errors beyond rounding are wrong masks."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers_tiny import build, tiny  # noqa: E402

import sagebwd  # noqa: E402
from reference import rel  # noqa: E402
from sagebwd.integrations import transformers as sage  # noqa: E402

pytestmark = pytest.mark.cpu_only
NAME, GATE = "sage-masks", 1e-4
EXACT = sagebwd.Recipe(high_precision=tuple(sagebwd.recipe.MATMULS))
B, S = 2, 12


@pytest.fixture(autouse=True)
def _registered():
    sage.register(NAME, recipe=EXACT)
    yield
    sage.unregister(NAME)


def model_of(kind, suffix="ForCausalLM", config=None, **changes):
    config = tiny(getattr(transformers, config or f"{kind}Config"), **changes)
    return build(getattr(transformers, kind + suffix), config)


def both(model, function):
    """What function gives with eager attention and with sagebwd."""
    model.set_attn_implementation("eager")
    want = function(model)
    model.set_attn_implementation(NAME)
    return function(model), want


def tokens(s=S):
    return torch.randint(3, 19, (B, s))


def ones_but(row, hidden):
    mask = torch.ones(B, S, dtype=torch.long)
    mask[row, hidden] = 0
    return mask


def generated(model, ids, **options):
    with torch.no_grad():
        out = model.generate(
            ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, output_logits=True,
            return_dict_in_generate=True, disable_compile=True, pad_token_id=0, **options
        )  # fmt: skip
    return torch.stack(out.logits) if out.logits else out.sequences.float()


CACHES = {
    "dynamic": {}, "static": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False), "beams": dict(num_beams=3),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "pieces": dict(prefill_chunk_size=5),
    "static beams": dict(num_beams=2, cache_implementation="static"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_generate(kind, cache, padded):
    """Unused slots of a static cache are no keys; a window moves over its cache."""
    if padded and cache == "prompt lookup":
        pytest.skip("one row only")
    model, ids = model_of(kind), tokens()
    mask = ones_but(1, slice(0, 4)) if padded else torch.ones_like(ids)
    if cache == "prompt lookup":
        ids, mask = ids[:1], mask[:1]
    got, want = both(model, lambda m: generated(m, ids, attention_mask=mask, **CACHES[cache]))
    assert rel(got, want) < GATE


def test_static_cache_without_a_mask():
    """Prefill and steps by hand, no attention_mask at all."""
    model, ids = model_of("Llama"), tokens()

    def steps(m):
        cache = transformers.StaticCache(config=m.config, max_cache_len=20)
        with torch.no_grad():
            parts = [
                m(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 10), (10, 12))
            ]
        return torch.cat(parts, 1)

    got, want = both(model, steps)
    assert rel(got, want) < GATE


HIDDEN = {"left": slice(0, 4), "right": slice(-4, None), "holes": slice(4, 7)}


@pytest.mark.parametrize("length", [9, S])
@pytest.mark.parametrize("side", HIDDEN)
def test_cross_attention_over_a_padded_encoder(side, length):
    """The padding of the keys is not that of the queries, even at equal lengths."""
    model, ids, decoder = model_of("Bart", "ForConditionalGeneration"), tokens(), tokens(length)
    mask = ones_but(1, HIDDEN[side])
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder)

    def logits_and_grads(m):
        m.zero_grad()
        logits = m(**inputs).logits
        logits.square().mean().backward()
        grads = [p.grad.flatten() for n, p in m.named_parameters() if "encoder_attn" in n]
        return logits.detach(), torch.cat(grads)

    got, want = both(model, logits_and_grads)
    assert rel(got[0], want[0]) < GATE and rel(got[1], want[1]) < 1e-3
    without = model(input_ids=ids, decoder_input_ids=decoder).logits
    assert rel(without, want[0]) > 0.05, "the padding matters here"


@pytest.mark.parametrize("side", HIDDEN)
def test_padding_of_a_decoder(side):
    model, ids, mask = model_of("Qwen3"), tokens(), ones_but(1, HIDDEN[side])
    got, want = both(model, lambda m: m(ids, attention_mask=mask).logits[mask.bool()])
    assert rel(got, want) < GATE


def test_holes_in_a_window_are_refused():
    """A window counts hidden tokens too, which documents cannot express."""
    model, ids = model_of("Mistral"), tokens()
    model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError, match="pad on one side"):
        model(ids, attention_mask=ones_but(1, HIDDEN["holes"]))


def test_windows_both_ways():
    """ModernBERT: local layers, and its keyword `deterministic`."""
    model, ids, mask = model_of("ModernBert", "Model"), tokens(), ones_but(1, HIDDEN["right"])
    got, want = both(model, lambda m: m(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    assert rel(got, want) < GATE


def alone(model, ids, lengths):
    """Logits of the documents of a row, each by itself: older transformers count the chunks of
    packed documents from the start of the row."""
    return torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)


def test_chunks():
    """Llama 4 attends within chunks, which are packed documents, also through a cache."""
    model, ids = model_of("Llama4", config="Llama4TextConfig"), tokens()
    mask = ones_but(1, HIDDEN["left"])
    for function in (
        lambda m: m(ids, attention_mask=mask).logits[mask.bool()],
        lambda m: generated(m, ids, attention_mask=mask),
    ):
        got, want = both(model, function)
        assert rel(got, want) < GATE
    restart = torch.cat([torch.arange(7), torch.arange(5)]).expand(B, S)
    got, _ = both(model, lambda m: m(ids, position_ids=restart, use_cache=False).logits)
    _, want = both(model, lambda m: alone(m, ids, [7, 5]))
    assert rel(got, want) < GATE


def test_blocks_that_see_each_other():
    """Tokens of a block see each other; text alone is plain causal; other unions are refused."""
    from transformers.masking_utils import create_causal_mask

    model = model_of("Llama")
    model.set_attn_implementation(NAME)
    options = dict(
        config=model.config, inputs_embeds=torch.zeros(B, S, 64), attention_mask=None,
        past_key_values=None
    )  # fmt: skip
    text = torch.full((B, S), -1)
    assert create_causal_mask(**options, block_sequence_ids=text).causal
    image = text.clone()
    image[0, 2:5] = 0
    assert create_causal_mask(**options, block_sequence_ids=text).later is None
    assert create_causal_mask(**options, block_sequence_ids=image).later is not None
    with pytest.raises(NotImplementedError, match="images.*one document a row"):
        packed = torch.arange(6).repeat(2).expand(B, S)
        create_causal_mask(**options, block_sequence_ids=image, position_ids=packed)
    with pytest.raises(NotImplementedError, match="sdpa"):
        create_causal_mask(**options, or_mask_function=lambda b, h, q, k: k < 3)
    with pytest.raises(NotImplementedError, match="sdpa"):
        create_causal_mask(**options, and_mask_function=lambda b, h, q, k: k < 3)


def test_a_mask_cannot_be_taken_for_a_tensor():
    """A model with attention code of its own must not run without its mask."""
    from transformers.masking_utils import create_causal_mask

    config = tiny(transformers.LlamaConfig)
    config._attn_implementation = NAME
    mask = create_causal_mask(config, torch.zeros(B, S, 64), None, None)
    for read in (lambda: torch.zeros(3) + mask, lambda: mask[:, :, :3], lambda: mask.dtype,
                 lambda: mask is None or torch.where(mask, 1, 0)):  # fmt: skip
        with pytest.raises(NotImplementedError, match="sdpa"):
            read()
    assert not hasattr(mask, "sum")


# --- packing --------------------------------------------------------------------------------------


def test_seq_idx():
    """TRL's packing says documents by seq_idx, beside position_ids and cu_seq_lens."""
    model, ids = model_of("Llama"), tokens()[:1]
    model.set_attn_implementation(NAME)
    restart = torch.cat([torch.arange(7), torch.arange(5)])[None]
    seq_idx = torch.tensor([[0] * 7 + [1] * 5], dtype=torch.int32)
    alone = torch.cat([model(ids[:, :7]).logits, model(ids[:, 7:]).logits], 1)
    cu = torch.tensor([0, 7, 12], dtype=torch.int32)
    given = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=7, max_length_k=7)
    for extra in ({}, given):
        got = model(ids, position_ids=restart, seq_idx=seq_idx, use_cache=False, **extra).logits
        assert rel(got, alone) < GATE
    with pytest.raises(NotImplementedError, match="leave attention_mask out"):
        model(ids, seq_idx=seq_idx, attention_mask=ones_but(0, slice(0, 2))[:1], use_cache=False)


@pytest.mark.parametrize("kind, config", [("Llama", None), ("Llama4", "Llama4TextConfig")])
def test_seq_idx_beside_other_documents(kind, config):
    """Documents of positions that start again, and the chunks of Llama 4."""
    seq_idx = torch.tensor([[0] * 7 + [1] * 5], dtype=torch.int32)
    ids, positions = tokens()[:1], torch.cat([torch.arange(3), torch.arange(9)])[None]
    other = ids.clone()
    other[:, :7] = (ids[:, :7] + 1) % 19
    model = model_of(kind, config=config)
    model.set_attn_implementation(NAME)
    run = lambda x: model(x, position_ids=positions, seq_idx=seq_idx, use_cache=False).logits
    first, second = run(ids), run(other)
    assert torch.equal(first[:, 7:], second[:, 7:])
    assert not torch.equal(first[:, :7], second[:, :7])


def test_documents_do_not_cut_the_chunks_of_a_row():
    """With a cache, transformers counts chunks from the start of the row."""
    model, ids = model_of("Llama4", config="Llama4TextConfig"), tokens()
    model.set_attn_implementation(NAME)
    offsets = lambda *ends: torch.tensor(ends, dtype=torch.int32)
    given = lambda cu: dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=S, max_length_k=S)
    inside = torch.tensor([[0] * 7 + [1] * 5] * B, dtype=torch.int32)
    for wrong in (given(offsets(0, 7, S, B * S)), dict(seq_idx=inside)):
        with pytest.raises(NotImplementedError, match="start again.*use_cache=False"):
            model(ids, **wrong)
    want = model(ids).logits
    rows = torch.arange(B, dtype=torch.int32)[:, None].expand(B, S)
    for right in (given(offsets(0, S, B * S)), dict(seq_idx=rows)):
        assert rel(model(ids, **right).logits, want) < GATE


def test_offsets_beside_chunks():
    """transformers' own collator gives both positions and offsets."""
    model = model_of("Llama4", config="Llama4TextConfig")  # chunks of 5
    rows = [dict(input_ids=torch.randint(3, 19, (n,)).tolist()) for n in (8, 13)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = {name: x for name, x in collate(rows).items() if name != "labels"}
    got, _ = both(model, lambda m: m(**batch, use_cache=False).logits)
    _, want = both(model, lambda m: alone(m, batch["input_ids"], [8, 13]))
    assert rel(got, want) < GATE


def test_offsets_cover_all_tokens():
    """Tokens of no document would get 0: offsets of one row, or of another part of the model."""
    model, ids = model_of("Llama"), tokens()
    model.set_attn_implementation(NAME)
    for ends, fits in (([0, 5, S, B * S], True), ([0, 5, S], False), ([0, 5, B * S + 1], False)):
        cu = torch.tensor(ends, dtype=torch.int32)
        given = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=S, max_length_k=S)
        run = lambda given=given: model(ids, use_cache=False, **given).logits
        if fits:
            with torch.inference_mode():
                given = {name: torch.tensor(ends, dtype=torch.int32) for name in list(given)[:2]}
                alone = run(given)
            assert torch.equal(run(), alone)
        else:
            with pytest.raises(NotImplementedError, match=f"end at {B * S}.*another part"):
                run()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_a_traced_model_takes_other_padding_and_documents():
    model, ids = model_of("Llama"), tokens()
    whole, padded = torch.ones_like(ids), ones_but(1, slice(0, 4))
    plain = torch.arange(S).expand(B, S)
    restart = torch.cat([torch.arange(7), torch.arange(5)]).expand(B, S)

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            return self.model(ids, attention_mask=mask, use_cache=False).logits[:, -1]

    class Packed(Masked):
        def forward(self, ids, positions):
            return self.model(ids, position_ids=positions, use_cache=False).logits

    for module, example, other in ((Masked(), whole, padded), (Packed(), plain, restart)):
        with torch.no_grad():
            model.set_attn_implementation("eager")
            want = module(ids, other)
            model.set_attn_implementation(NAME)
            traced = torch.jit.trace(module, (ids, example), check_trace=False)
            assert rel(traced(ids, other), want) < GATE


@pytest.mark.parametrize("window, s, kv", [(2048, 4, 11), (2048, 11, 4), (2, 11, 11), (2, 4, 11)])
def test_windows_to_both_sides(window, s, kv):
    from transformers.masking_utils import create_bidirectional_sliding_window_mask

    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=1, sliding_window=window
    )
    given = dict(inputs_embeds=torch.zeros(B, s, 32), attention_mask=None,
                 encoder_hidden_states=torch.zeros(B, kv, 32))  # fmt: skip
    q, k, v = (torch.randn(B, 2, n, 16) for n in (s, kv, kv))
    config._attn_implementation = "eager"
    mask = create_bidirectional_sliding_window_mask(config, **given)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    config._attn_implementation = NAME
    if window < kv and s != kv:
        with pytest.raises(NotImplementedError, match="both sides.*sdpa"):
            create_bidirectional_sliding_window_mask(config, **given)
        return
    call = transformers.AttentionInterface._global_mapping[NAME]
    mask = create_bidirectional_sliding_window_mask(config, **given)
    module = torch.nn.Module()
    module.is_causal = False
    assert rel(call(module, q, k, v, mask)[0].transpose(1, 2), want) < GATE


def test_queries_that_all_rows_share():
    """Granite Speech leaves its learned queries at a batch of one."""
    call = transformers.AttentionInterface._global_mapping[NAME]
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(3, 2, 9, 16), torch.randn(3, 2, 9, 16)
    want = torch.nn.functional.scaled_dot_product_attention(q.expand(3, -1, -1, -1), k, v)
    got = call(torch.nn.Module(), q, k, v, None, is_causal=False)[0]
    assert rel(got.transpose(1, 2), want) < GATE


def test_packed_false_is_a_promise():
    sage.register(NAME, packed=False)
    model = model_of("Llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="packed=True"):
        model(tokens(), position_ids=torch.arange(6).repeat(2).expand(B, S), use_cache=False)


def test_gaps_in_positions_are_no_documents():
    """Eager attention with a cache does not look at positions at all."""
    model, ids = model_of("Llama", num_hidden_layers=1), tokens()
    positions = (2 * torch.arange(S)).expand(B, S)
    with torch.no_grad():
        want = model(input_ids=ids, position_ids=positions).logits
        model.set_attn_implementation(NAME)
        assert rel(model(input_ids=ids, position_ids=positions).logits, want) < GATE


@pytest.mark.slow
def test_compile_fullgraph():
    """One graph for a model with a window, a padding mask and packed positions: nothing is read on
    the host, and what cannot be expressed is refused when it runs."""
    model, ids = model_of("Mistral", num_hidden_layers=1), tokens()
    model.set_attn_implementation(NAME)
    plain, restart = torch.arange(S).expand(B, S), torch.arange(6).repeat(2).expand(B, S)
    whole = torch.ones_like(ids)
    torch._dynamo.reset()
    # The compiler of PyTorch 2.11 cannot look into transformers' mask functions.
    fullgraph = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)

    def step(m, mask, positions):
        model.zero_grad()
        out = m(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        out = out[mask.bool()]
        out.square().mean().backward()
        return out.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    outputs = []
    for mask, positions in (
        (whole, plain), (ones_but(1, HIDDEN["left"]), plain), (ones_but(1, HIDDEN["right"]), plain),
        (whole, restart),
    ):  # fmt: skip
        want, got = step(model, mask, positions), step(compiled, mask, positions)
        assert all(rel(a, b) < GATE for a, b in zip(got, want))
        outputs.append(want[0])
    assert rel(outputs[3], outputs[0]) > 0.05, "packing matters here"
    with pytest.raises(RuntimeError, match="pad on one side"):
        step(compiled, ones_but(1, HIDDEN["holes"]), plain)
    torch._dynamo.reset()


def test_compiled_graphs_count_documents():
    from sagebwd.integrations.transformers_masks import Pattern, room_for

    assert room_for(1, 8192, True) == 129 and room_for(1, 8192, 1000) == 1000
    assert room_for(2, 8, True) == 16, "never more than tokens"

    def split(starts):
        return Pattern((1, 1, 8, 8), True, first=0).split(starts, 3).rows().cu_q

    compiled = torch.compile(split, backend="aot_eager", fullgraph=True)
    starts = torch.zeros(1, 8, dtype=torch.bool)
    starts[0, 5] = True
    assert compiled(starts).tolist() == [0, 5, 8, 8]
    with pytest.raises(RuntimeError, match="packed=..."):
        compiled(torch.ones(1, 8, dtype=torch.bool))
    torch._dynamo.reset()


# --- layers and refusals --------------------------------------------------------------------------


def test_exact_layers_without_layer_idx():
    model = model_of("ViT", "Model")
    pixels = torch.randn(B, 3, 32, 32)
    run = lambda m: m(pixels).last_hidden_state.detach()
    sage.register(NAME, exact_layers=(0,))
    with pytest.raises(ValueError, match="number_layers"):
        both(model, run)
    assert sorted(set(sage.number_layers(model).values())) == [0, 1]
    errors = []
    for layers in ((), (0,), (0, 1)):
        sage.register(NAME, exact_layers=layers)
        errors.append(rel(*both(model, run)))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-5
    with pytest.raises(ValueError, match="no numbered module"):
        sage.number_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["Llama", "Bart"])
def test_exact_layers_that_do_not_exist(kind):
    model = model_of(kind)
    sage.register(NAME, exact_layers=(2,))
    with pytest.raises(ValueError, match="got layer 2, but the model of .* has 2"):
        both(model, lambda m: m(tokens()))
    with pytest.raises(ValueError, match="exact_layers"):
        sage.register(NAME, exact_layers=(-1,))


@pytest.mark.parametrize(
    "kind, suffix, field",
    [
        ("Llama", "ForCausalLM", "attention_dropout"),
        ("GPT2", "LMHeadModel", "attn_pdrop"),
        ("Bert", "Model", "attention_probs_dropout_prob"),
    ],
)
def test_25_dropout_names_its_field(kind, suffix, field):
    model = model_of(kind, suffix, **{field: 0.1}).train()
    model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError, match=f"{field}=0.0"):
        model(tokens())


@pytest.mark.parametrize(
    "keyword, remedy",
    [
        (dict(softcap=-30.0), "softcap"),
        (dict(output_attentions=True), "eager"),
        (dict(position_bias=1.0), "a bias.*sdpa"),
        (dict(attn_bias=1.0), "a bias.*sdpa"),
        (dict(cache=1), "paged.*sdpa"),
        (dict(surprise=1), r"ignore=\('surprise',\)"),
        (dict(cu_seq_lens_q=torch.zeros(2)), "together"),
    ],
)
def test_25_refusals_name_a_remedy(keyword, remedy):
    module = torch.nn.Module()
    call = transformers.AttentionInterface._global_mapping[NAME]
    q = torch.randn(1, 2, 8, 32)
    with pytest.raises((NotImplementedError, ValueError), match=remedy):
        call(module, q, q, q, None, is_causal=True, **keyword)


def test_25_masks_of_others_are_refused():
    module = torch.nn.Module()
    call = transformers.AttentionInterface._global_mapping[NAME]
    q = torch.randn(1, 2, 8, 32)
    with pytest.raises(NotImplementedError, match="drawn.*sdpa"):
        call(module, q, q, q, torch.zeros(1, 1, 8, 8))
    for module.is_causal in (None, True):  # BridgeTower: causal in name, full attention in eager
        with pytest.raises(NotImplementedError, match="no mask.*eager"):
            call(module, q, q, q, None)
    big = torch.randn(1, 2, 8, 264)
    with pytest.raises(NotImplementedError, match="264.*sdpa"):
        call(module, big, big, big, None, is_causal=True)
    with pytest.raises(ValueError, match="changes attention"):
        sage.register(NAME, ignore=("position_bias",))
    sage.register(NAME, ignore=("surprise",))
    call = transformers.AttentionInterface._global_mapping[NAME]
    call(module, q, q, q, None, is_causal=True, surprise=1)


def test_head_dims_of_any_size():
    """Padded with zeros to a multiple of 8, for values too."""
    module = torch.nn.Module()
    call = transformers.AttentionInterface._global_mapping[NAME]
    q, k, v = torch.randn(1, 4, 9, 20), torch.randn(1, 2, 9, 20), torch.randn(1, 2, 9, 29)
    out, _ = call(module, q, k, v, None, is_causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    assert rel(out.transpose(1, 2), want) < GATE


# --- documents by positions, with a cache and beside padding --------------------------------------


PACKED = {
    "Llama": {}, "Mistral": {}, "Persimmon": {}, "Llama4": dict(config="Llama4TextConfig"),
}  # fmt: skip


@pytest.mark.parametrize("cache", ["no cache", "dynamic", "static"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_documents_are_alone_or_refused(kind, padding, cache):
    """Positions that start again, whether or not a model hands them to its attention."""
    model, ids = model_of(kind, **PACKED[kind]), tokens(13)[:1]
    model.set_attn_implementation(NAME)
    alone = torch.cat([model(ids[:, :6]).logits, model(ids[:, 6:]).logits], 1)
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None]
    sides = {None: (0, 0), "left": (3, 0), "right": (0, 3)}[padding]
    pad = lambda x: torch.nn.functional.pad(x, sides)
    inputs = dict(input_ids=pad(ids), position_ids=pad(positions), use_cache=cache != "no cache")
    if padding:
        inputs["attention_mask"] = pad(torch.ones_like(ids))
    if cache == "static":
        inputs["past_key_values"] = transformers.StaticCache(config=model.config, max_cache_len=20)
    chunked = kind == "Llama4" and (padding or cache != "no cache")
    if chunked or (cache == "static" and kind != "Mistral"):
        with pytest.raises(NotImplementedError, match="use_cache=False"):
            model(**inputs)
        return
    try:
        got = model(**inputs).logits[:, sides[0] : sides[0] + 13]
    except NotImplementedError as error:
        assert cache == "static" and "use_cache=False" in str(error)
    else:
        assert rel(got, alone) < GATE


def test_the_first_token_after_padding_starts_no_document():
    """Left padding has any positions, also 0, and a cache may be filled in pieces."""
    model, ids, mask = model_of("Llama"), tokens(), ones_but(1, slice(0, 7))
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def pieces(m):
        cache = transformers.DynamicCache(config=m.config)
        parts = [
            m(ids[:, a:b], position_ids=positions[:, a:b], attention_mask=mask[:, :b],
              past_key_values=cache).logits
            for a, b in ((0, 5), (5, 9), (9, S))
        ]  # fmt: skip
        return torch.cat(parts, 1)[mask.bool()]

    with torch.no_grad():
        got, want = both(model, pieces)
    assert rel(got, want) < GATE


# --- images ---------------------------------------------------------------------------------------


def gemma3():
    vision = dict(hidden_size=144, intermediate_size=96, num_hidden_layers=1,
                  num_attention_heads=2, image_size=56, patch_size=14)  # fmt: skip
    text = tiny(transformers.Gemma3TextConfig)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=transformers.SiglipVisionConfig(**vision),
        mm_tokens_per_image=4, image_token_id=110,
    )  # fmt: skip
    return build(transformers.Gemma3ForConditionalGeneration, config)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_token_types_of_text(side):
    """The processor of Gemma 3 always gives token types; without images the mask is causal."""
    model, ids = gemma3(), tokens()
    mask = torch.ones_like(ids) if side is None else ones_but(1, HIDDEN[side])
    inputs = dict(input_ids=ids, token_type_ids=torch.zeros_like(ids), attention_mask=mask)
    got, want = both(model, lambda m: m(**inputs).logits[mask.bool()])
    assert rel(got, want) < GATE


def with_image(ids, at, row=None):
    ids = ids.clone()
    ids[slice(None) if row is None else row, at : at + 4] = 110
    return ids


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_images(side):
    """Tokens of an image see each other both ways, in full and in sliding layers (window 6)."""
    model, ids = gemma3(), with_image(with_image(tokens(16), 4), 10, row=0)
    mask = torch.ones_like(ids)
    if side:
        mask[1, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    pixels = torch.randn(3, 3, 56, 56)
    types = (ids == 110).long()
    inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=pixels)

    def logits_and_grads(m, types=types):
        m.zero_grad()
        logits = m(**inputs, token_type_ids=types).logits[mask.bool()]
        logits.square().mean().backward()
        grads = [p.grad.flatten() for n, p in m.named_parameters() if "k_proj" in n and "lang" in n]
        return logits.detach(), torch.cat(grads)

    got, want = both(model, logits_and_grads)
    assert rel(got[0], want[0]) < GATE and rel(got[1], want[1]) < 1e-3
    causal = logits_and_grads(model, torch.zeros_like(types))
    assert rel(causal[0], want[0]) > 0.01, "seeing both ways matters here"


@pytest.mark.parametrize("cache", ["dynamic", "static", "pieces", "no cache"])
def test_generate_after_an_image(cache):
    model, ids = gemma3(), with_image(tokens(16), 4)
    inputs = dict(pixel_values=torch.randn(2, 3, 56, 56), token_type_ids=(ids == 110).long())
    run = lambda m: generated(m, ids, **inputs, **CACHES[cache])
    try:
        got, want = both(model, run)
    except NotImplementedError as error:
        assert cache == "static" and "sdpa" in str(error)
    else:
        assert rel(got, want) < GATE


def test_a_block_in_several_parts():
    """Molmo and PaliGemma give one number to all tokens that see each other."""
    from transformers.masking_utils import create_causal_mask

    config = tiny(transformers.LlamaConfig)
    blocks = torch.full((B, S), -1)
    blocks[0, [1, 2, 6, 7, 11]] = 0
    blocks[1, [0, 5]] = 3
    blocks[1, 7] = 1
    visible = ones_but(0, slice(6, 7)).bool()
    given = dict(config=config, inputs_embeds=torch.zeros(B, S, 64), attention_mask=visible,
                 past_key_values=None, block_sequence_ids=blocks)  # fmt: skip
    q, k, v = (torch.randn(B, 4, S, 16, requires_grad=True) for _ in range(3))
    config._attn_implementation = "eager"
    mask = create_causal_mask(**given)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    want = want.transpose(1, 2)[visible]
    config._attn_implementation = NAME
    call = transformers.AttentionInterface._global_mapping[NAME]
    got = call(torch.nn.Module(), q, k, v, create_causal_mask(**given))[0][visible]
    assert rel(got, want) < GATE
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want))):
        assert rel(a, b) < 1e-3


def test_old_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(sage, "_OLDEST", (99, 1))
    with pytest.raises(ImportError, match="99.1 or newer, got 5.*pip install"):
        sage.register("sage-old")
