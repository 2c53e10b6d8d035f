# SPDX-License-Identifier: Apache-2.0
"""Runs tiny models of every family of transformers with eager attention and with sagebwd.

    python tests/python/transformers_families.py --write docs/transformers-families.md   # all; long
    python tests/python/transformers_families.py llama bart vit                 # these, to look at

Matmuls stay in floating point here, so that any error beyond rounding is a wrong mask; one more run
is in INT8. VERDICTS says what comes out of it.
"""

import argparse
import contextlib
import copy
import inspect
import json
import multiprocessing
import os
import re
import sys
import time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto import configuration_auto, modeling_auto  # noqa: E402
from transformers_tiny import build, tiny  # noqa: E402

import sagebwd  # noqa: E402
from reference import rel  # noqa: E402
from sagebwd.integrations import transformers as sage  # noqa: E402

EXACT, INT8 = "families-exact", "families-int8"
GATE, GRAD_GATE, INT8_GATE = 1e-3, 5e-3, 0.5
B, S = 2, 12
# What people train most: these stand first in the table.
TRAINED = (
    "llama qwen2 qwen3 qwen3_moe qwen3_5 mistral mixtral gemma3_text gpt_oss deepseek_v3 phi3 "
    "olmo3 smollm3 qwen2_5_vl qwen3_vl modernbert whisper gemma4_text t5"
).split()
HOLES = "cannot be combined with a sliding window"  # a limit that all families with windows share

# The first of these mappings that has a family gives its class.
KINDS = [
    ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    ("seq2seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    ("causal", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("causal", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"),
    ("encoder", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    ("encoder", "MODEL_MAPPING_NAMES"),
]


def register(fallback=None):
    exact = sagebwd.Recipe(high_precision=tuple(sagebwd.recipe.MATMULS))
    sage.register(EXACT, recipe=exact, fallback=fallback)
    sage.register(INT8, fallback=fallback)


class Calls:
    """Counts attention calls that reach sagebwd."""

    def __init__(self):
        self.count = 0
        mapping = transformers.AttentionInterface._global_mapping
        for name in (EXACT, INT8):
            mapping[name] = self._counted(mapping[name])

    def _counted(self, function):
        def call(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def attention(model, name):
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation("eager")


# --- inputs ---------------------------------------------------------------------------------------


def padding(side, b=B, s=S):
    mask = torch.ones(b, s, dtype=torch.long)
    mask[-1, {"left": slice(0, 4), "right": slice(-4, None), "holes": slice(4, 7)}[side]] = 0
    return mask


def tokens(s=S, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 19, (B, s), generator=g)


def main_input(model):
    """Arguments besides text: pixels or sound, by the name of the model's main input."""
    name, config = model.main_input_name, model.config
    g = torch.Generator().manual_seed(1)
    if name == "input_ids":
        return {"input_ids": tokens()}
    if name in ("pixel_values", "pixel_values_videos"):
        size = getattr(config, "image_size", None) or 32
        size = size if isinstance(size, int) else size[0]
        shape = (B, getattr(config, "num_channels", 3), size, size)
        return {name: torch.randn(shape, generator=g)}
    if name == "input_features":
        mel = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
        length = 2 * getattr(config, "max_source_positions", 32)
        if getattr(config, "model_type", "") not in ("whisper", "qwen2_audio_encoder"):
            return {name: torch.randn((B, 32, mel), generator=g)}
        return {name: torch.randn((B, mel, length), generator=g)}
    if name == "input_values":
        return {name: torch.randn((B, 4000), generator=g)}
    raise NotImplementedError(f"an input called {name}")


def floats(output):
    """The tensors to compare: logits or the last hidden state."""
    for name in ("logits", "last_hidden_state", "logits_per_image", "pooler_output"):
        t = output.get(name) if hasattr(output, "get") else None
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            return t.float()
    for t in output.values() if hasattr(output, "values") else output:
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            return t.float()
    raise TypeError("no output to compare")


# --- cases ----------------------------------------------------------------------------------------


def run(model, keep=None, grads=False, **inputs):
    """[outputs of real tokens] or [gradients]."""
    mask = inputs.get("attention_mask")
    if mask is not None and "input_ids" in inputs:
        inputs["input_ids"] = inputs["input_ids"] * mask  # models look for ends among the tokens
    torch.manual_seed(0)  # some models hide random patches
    with torch.set_grad_enabled(grads):
        out = floats(model(**inputs))
        if keep is not None and out.dim() == 3 and out.shape[1] == keep.shape[1]:
            out = out[keep.bool()]
        if not grads:
            return [out]
        model.zero_grad()
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        (out * weights).sum().backward()
        return [
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()
        ]


def in_steps(model, ids, **cache):
    """Logits of a prompt fed in three pieces through a cache."""
    outs, start = [], 0
    for n in (5, 4, 3):
        if _takes(model, "position_ids"):  # without them, Bamba counts from 0 in every call
            cache["position_ids"] = torch.arange(start, start + n)[None]
        out = model(input_ids=ids[:, start : start + n], use_cache=True, **cache)
        cache["past_key_values"] = out.past_key_values
        outs.append(out.logits.float())
        start += n
    return outs


def generated(model, ids, **options):
    out = model.generate(
        ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, return_dict_in_generate=True,
        output_logits=True, disable_compile=True, **options
    )  # fmt: skip
    if not out.logits:
        raise TypeError("generate gives no logits")
    return [torch.stack([t.float() for t in out.logits])]


def cases(model, kind):
    """(name, function of the model) pairs."""
    if kind == "causal":
        ids = tokens()
        restart = torch.cat([torch.arange(7), torch.arange(S - 7)]).expand(B, S)
        yield "plain", lambda m: run(m, input_ids=ids)
        yield "gradients", lambda m: run(m, grads=True, input_ids=ids)
        for side in ("left", "right", "holes"):
            mask = padding(side)
            yield (
                f"{side} padding",
                lambda m, mask=mask: run(
                    m, mask, input_ids=ids, attention_mask=mask, use_cache=False
                ),
            )
        left = padding("left")
        yield (
            "gradients, padding",
            lambda m: run(m, left, True, input_ids=ids, attention_mask=left, use_cache=False),
        )
        if _takes(model, "position_ids"):
            yield "packed", lambda m: run(m, input_ids=ids, position_ids=restart, use_cache=False)
        yield "cache in pieces", lambda m: in_steps(m, ids)
        yield "generate", lambda m: generated(m, ids, attention_mask=torch.ones_like(ids))
        yield "generate, padding", lambda m: generated(m, ids, attention_mask=left)
        for name, options in (
            ("static", dict(attention_mask=torch.ones_like(ids))),
            ("static, padding", dict(attention_mask=left)),
        ):
            yield (
                f"generate {name}",
                lambda m, options=options: generated(
                    m, ids, cache_implementation="static", **options
                ),
            )
        return
    base = main_input(model)
    if kind == "seq2seq" and "input_ids" in base:
        for name, length in (("", 9), (", equal lengths", S)):
            decoder = tokens(length, 5)
            inputs = dict(base, decoder_input_ids=decoder)
            yield f"plain{name}", lambda m, i=inputs: run(m, **i)
            for side in ("left", "right", "holes"):
                mask = padding(side)
                yield (
                    f"encoder {side} padding{name}",
                    lambda m, i=inputs, mask=mask: run(m, attention_mask=mask, **i),
                )
        mask = padding("right")
        yield "gradients, padding", lambda m: run(m, None, True, attention_mask=mask, **inputs)
        yield "decoder padding", lambda m: run(m, mask, decoder_attention_mask=mask, **inputs)
        ids = base["input_ids"]
        yield "generate, padding", lambda m: generated(m, ids, attention_mask=mask)
        yield (
            "generate static, padding",
            lambda m: generated(m, ids, attention_mask=mask, cache_implementation="static"),
        )
    elif kind == "seq2seq":
        inputs = dict(base, decoder_input_ids=tokens(9, 5))
        yield "plain", lambda m: run(m, **inputs)
        yield "gradients", lambda m: run(m, grads=True, **inputs)
    else:
        if "pixel_values" in base and _takes(model, "input_ids"):
            base["input_ids"] = tokens()
        elif "input_ids" in base and _takes(model, "pixel_values"):
            size = getattr(getattr(model.config, "vision_config", None), "image_size", 32)
            if getattr(model.config, "vision_config", None) is not None:
                base["pixel_values"] = torch.randn(B, 3, size, size)
        if model.config.is_encoder_decoder and "input_ids" in base:
            base["decoder_input_ids"] = tokens(9, 5)
        yield "plain", lambda m: run(m, **base)
        yield "gradients", lambda m: run(m, grads=True, **base)
        if "input_ids" in base and _takes(model, "attention_mask"):
            # A text tower beside a vision tower may take its first token for the whole sentence.
            for side in (
                ("right", "holes") if "pixel_values" in base else ("left", "right", "holes")
            ):
                mask = padding(side)
                yield (
                    f"{side} padding",
                    lambda m, mask=mask: run(m, mask, attention_mask=mask, **base),
                )
            right = padding("right")
            yield "gradients, padding", lambda m: run(m, right, True, attention_mask=right, **base)


def apart(model):
    """What the case "packed" means: each document alone."""
    ids = tokens()
    parts = [run(model, input_ids=t, use_cache=False)[0] for t in (ids[:, :7], ids[:, 7:])]
    return [torch.cat(parts, 1)]


def _takes(model, name):
    return name in inspect.signature(model.forward).parameters


# --- verdicts -------------------------------------------------------------------------------------


def class_of(family):
    for kind, mapping in KINDS:
        name = getattr(modeling_auto, mapping).get(family)
        name = name[0] if isinstance(name, (tuple, list)) else name
        if name is not None and hasattr(transformers, name):
            return kind, getattr(transformers, name)
    return None, None


def short(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def clear(error):
    """Whether a refusal is one of ours, in words."""
    return isinstance(error, (NotImplementedError, ValueError)) and (
        "sagebwd" in str(error) or "head dim" in str(error)
    )


def try_family(family, fallback=None):
    """{family, class, kind, verdict, cases: {name: what happened}}"""
    result = dict(family=family, model="", kind="", verdict="not tried", cases={}, why="")
    kind, model_class = class_of(family)
    if model_class is None:
        return dict(result, verdict="part")
    result.update(model=model_class.__name__, kind=kind)
    register(fallback)
    calls = Calls()
    try:
        config = tiny(transformers.CONFIG_MAPPING[family])
        if not isinstance(config, model_class.config_class):
            config = config.get_text_config()
        config._attn_implementation = "eager"
        model = build(model_class, config)
        model.set_attn_implementation("eager")
        if kind == "seq2seq" and not config.is_encoder_decoder:
            kind = result["kind"] = "causal"  # sound in, text out, by one decoder
        listed = list(cases(model, kind))
    except BaseException as error:  # noqa: BLE001 (whatever it is, it goes into the table)
        result["why"] = short(error)
        return result
    reached, worst = 0, 0.0
    for name, case in listed:
        try:
            want = case(model)
            if not all(torch.isfinite(t).all() for t in want):
                raise ValueError("not finite in eager mode")
        except BaseException as error:  # noqa: BLE001
            result["cases"][name] = "eager fails: " + short(error)
            if name == "plain":
                break
            continue
        before = calls.count
        try:
            with attention(model, EXACT):
                got = case(model)
            gate = GRAD_GATE if "gradients" in name else GATE
            error = max(rel(a, b) for a, b in zip(got, want))
            if name == "packed" and error > gate:  # some families do not tell documents to eager
                error = rel(got[0], apart(model)[0])
            worst = max(worst, error)
            result["cases"][name] = "works" if error < gate else f"wrong: error {error:.2g}"
        except BaseException as error:  # noqa: BLE001
            kind_of = "refused: " if clear(error) else "unclear: "
            result["cases"][name] = kind_of + short(error)
            reached += isinstance(error, NotImplementedError)
        reached += calls.count - before
        if name == "plain" and result["cases"][name] == "works":
            try:
                with attention(model, INT8):
                    error = rel(case(model)[0], want[0])
                if not error < INT8_GATE:
                    result["cases"]["int8"] = f"wrong: error {error:.2g}"
            except BaseException as error:  # noqa: BLE001
                result["cases"]["int8"] = "unclear: " + short(error)
    happened = list(result["cases"].values())
    result["error"] = worst
    ran = [h for h in happened if not h.startswith("eager fails")]
    if any(h.startswith("wrong") for h in ran):
        result["verdict"] = "wrong"
    elif not ran:
        result["why"] = happened[0] if happened else "no case"
    elif not reached:
        result["verdict"], result["why"] = loaded_with_the_name(model, listed)
    elif any(h == "works" for h in ran):
        whole = all(h == "works" or HOLES in h for h in ran)
        result["verdict"] = "works" if whole else "works in part"
    else:
        result["verdict"] = "refuses"
    return result


def loaded_with_the_name(model, listed):
    """What a model that never calls us does when it is loaded with our name, which transformers
    allows: (verdict, words)."""
    try:
        other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=EXACT)
        other.load_state_dict(model.state_dict())
        other = other.float().eval()
    except Exception as error:  # noqa: BLE001
        return "no effect", "transformers refuses the name: " + short(error)
    for name, case in listed:
        try:
            want = case(model)
        except Exception:  # noqa: BLE001
            continue
        try:
            got = case(other)
        except NotImplementedError:
            return "no effect", "raises if loaded with the name"
        except Exception as error:  # noqa: BLE001
            return "no effect", "fails if loaded with the name: " + short(error)
        if max(rel(a, b) for a, b in zip(got, want)) > GRAD_GATE:
            return "wrong", f"{name}: loaded with the name, it differs from eager"
    return "no effect", "runs its own code if loaded with the name"


# --- the sweep ------------------------------------------------------------------------------------


def _in_process(family, queue):
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    queue.put(try_family(family))


def sweep(families, jobs, timeout, log):
    """One process per family, forked after the imports: a crash or a hang costs one row."""
    for family in ("llama", "bart", "vit"):
        try_family(family)  # imports what nearly all families need, once
    context = multiprocessing.get_context("fork")
    waiting, running = list(families), []
    while waiting or running:
        while waiting and len(running) < jobs:
            family, queue = waiting.pop(0), context.Queue()
            process = context.Process(target=_in_process, args=(family, queue), daemon=True)
            process.start()
            running.append((family, queue, process, time.time()))
        for entry in list(running):
            family, queue, process, start = entry
            result = None
            with contextlib.suppress(Exception):
                result = queue.get(timeout=0.02)
            late = time.time() - start > timeout
            if result is None and process.is_alive() and not late:
                continue
            if result is None:
                why = "took too long" if late else f"died with exit code {process.exitcode}"
                result = dict(
                    family=family, model="", kind="", verdict="not tried", cases={}, why=why
                )
            process.kill()
            process.join()
            running.remove(entry)
            result["seconds"] = round(time.time() - start, 1)
            log.write(json.dumps(result) + "\n")
            log.flush()
            yield result


VERDICTS = {
    "works": "every case that runs in eager mode agrees; between tokens of a window, padding is "
    "refused",
    "works in part": "some cases are refused, the others agree",
    "refuses": "raises NotImplementedError with the reason and the remedy",
    "no effect": "the family has attention code of its own, or none at all, and never calls ours",
    "part": "the config of a part of another family, or of no model",
    "not tried": "the tiny model could not be built from the config alone, or does not run in "
    "eager mode either",
    "wrong": "differs from eager attention without an error",
}


def words(result):
    """The last column of the table: what was refused, and why."""
    if result["why"]:
        return result["why"].removeprefix("eager fails: ")
    refusals = {}
    for case, what in result["cases"].items():
        if what != "works" and not what.startswith("eager fails"):
            reason = re.sub(r"^(refused|unclear|wrong): (\w+: )?(sagebwd: )?", "", what)
            refusals.setdefault(reason.split(";")[0], []).append(case)
    failed = [case for case, what in result["cases"].items() if what.startswith("eager fails")]
    if failed:
        refusals["not in eager mode either"] = failed
    everything = len(refusals) == 1 and result["verdict"] == "refuses"
    return ". ".join(f"{'' if everything else ', '.join(names) + ': '}{reason}"
                     for reason, names in refusals.items())  # fmt: skip


def write(path, results):
    """Puts the table between the marks of a markdown file."""
    with open(path) as file:
        head, _, rest = file.read().partition("<!-- begin families -->\n")
    _, _, tail = rest.partition("<!-- end families -->")
    count = {v: sum(r["verdict"] == v for r in results) for v in VERDICTS}
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, "
        f"{len(results)} families.", "",
        "| verdict | families | |", "|---|---|---|",
        *(f"| {v} | {count[v]} | {VERDICTS[v]} |" for v in VERDICTS if count[v]), "",
    ]  # fmt: skip
    ordered = sorted(results, key=lambda r: (r["verdict"] in ("not tried", "part"), r["family"]))
    by_name = {r["family"]: r for r in results}
    first = [by_name[family] for family in TRAINED if family in by_name]
    for title, part in (
        ("Trained most", first),
        ("All others", [r for r in ordered if r not in first]),
    ):
        lines += [f"## {title}", "", "| family | class | verdict | |", "|---|---|---|---|"]
        for r in part:
            note = words(r).replace("|", "/").replace("<", "&lt;")
            note = note if len(note) < 220 else note[:217] + "..."
            lines.append(f"| {r['family']} | {r['model']} | {r['verdict']} | {note} |")
        lines.append("")
    with open(path, "w") as file:
        file.write(f"{head}<!-- begin families -->\n" + "\n".join(lines)
                   + f"\n<!-- end families -->{tail}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", help="markdown file whose table to write")
    parser.add_argument("--log", default=os.devnull, help="JSON lines of every case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120)
    arguments = parser.parse_args()
    families = arguments.families or sorted(configuration_auto.CONFIG_MAPPING_NAMES)
    torch.set_num_threads(1)
    results = {}
    if arguments.write and os.path.isfile(arguments.log):  # families of an earlier run stay
        with open(arguments.log) as log:
            results = {r["family"]: r for r in map(json.loads, log)}
    with open(arguments.log, "a") as log:
        for result in sweep(families, arguments.jobs, arguments.timeout, log):
            results[result["family"]] = result
            print(f"{result['family']:30} {result['verdict']:14} {result['seconds']:5.1f} s  "
                  f"{result['why'][:100]}", flush=True)  # fmt: skip
            if len(arguments.families) < 10:
                for name, what in result["cases"].items():
                    print(f"    {name}: {what}")
    if arguments.write:
        write(arguments.write, list(results.values()))


if __name__ == "__main__":
    main()
