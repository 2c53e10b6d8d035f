#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of the documents from the records under results/. With --check it only
compares.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def record(path):
    return json.loads((ROOT / "results" / path).read_text())


def source(r):
    state = " with changes" if r["clean"] is False else ""  # None: not known
    return f"\n`{r['command']}`, commit {r['commit'][:10]}{state}, {r['date']}.\n"


def accuracy(name):
    """Relative L2 error of the outputs, one row a case."""
    r = record(f"accuracy/{name}.json")
    out = ["| inputs | recipe | O | dQ | dK | dV | cos dQ |", "|---|---|---|---|---|---|---|"]
    for c in r["cases"]:
        t = c["tensors"]
        label = f"σ = {c['sigma']:g}" if c["inputs"] == "gaussian" else c["inputs"]
        errors = " | ".join(f"{t[x]['rel_l2']:.4f}" for x in ("O", "dQ", "dK", "dV"))
        out.append(f"| {label} | `{c['recipe']}` | {errors} | {t['dQ']['cos']:.5f} |")
    return "\n".join(out) + "\n" + source(r)


KINDS = {
    "`gaussian`": "gaussian",
    "`sinks`: four sinks": "sinks",
    "`strong_sink`: 95 % of every row": "strong_sink",
    "`offset`: a mean key of 10 σ": "offset",
    "`rope_bias`: a mean of 30 σ under rotary positions": "rope_bias",
    "`channels`: outlier channels of Q and K": "channels",
    "`value_channel`: an outlier channel of V": "value_channel",
    "`heavy`: heavy tails of Q and K": "heavy",
    "`long_key`: one key of 128 is 20 times longer": "long_key",
    "`late_long`: later keys are 20 times longer": "late_long",
    "`previous`: each query attends to one key": "previous",
    "`one_hot`: nearly all of a row on one key": "one_hot",
}
SINKS = ("sink", "sink_127", "sink_128", "sink_middle", "sink_last")
DELIMITERS = ("delimiters6", "delimiters7", "delimiters8")


def kinds():
    """Errors of the default recipe by kind of inputs, in per cent."""
    masks, recipe = ("full", "causal"), "vectorwise"

    def errors(name):
        return {
            (c["recipe"], c["inputs"]): [
                100 * c["tensors"][t]["rel_l2"] for t in ("O", "dQ", "dK", "dV")
            ]
            for c in record(f"accuracy/{name}.json")["cases"]
        }

    def percent(x):
        return f"{x:.1f}" if x < 9.95 else f"{x:.0f}"

    found = [errors(f"kinds_{mask}") | errors(f"kinds_{mask}_dither") for mask in masks]
    out = ["| inputs | full, d 128 | causal, d 64 |", "|---|---|---|"]

    def row(label, cell, switches=""):
        """``cell`` of the errors by kind, for each mask."""
        cells = [cell(lambda kind: of_mask[recipe + switches, kind]) for of_mask in found]
        out.append(f"| {label} | {' | '.join(cells)} |")

    for label, kind in KINDS.items():
        row(label, lambda of: " / ".join(map(percent, of(kind))))
    of_dq = lambda of, names: [of(name)[1] for name in names]
    row(
        "a sink at key 0, 127, 128, in the middle or last: dQ",
        lambda of: "–".join(percent(pick(of_dq(of, SINKS))) for pick in (min, max)),
    )
    for label, switches in (
        ("`delimiters`, logit gap 6, 7, 8: dQ", ""),
        ('the same with `rounding="dither:dQ"`', " rounding=dither:dQ"),
        ('the same with `rounding="dither:O,dQ"`', " rounding=dither:O,dQ"),
    ):
        row(label, lambda of: ", ".join(map(percent, of_dq(of, DELIMITERS))), switches)
    sources = [
        source(record(f"accuracy/kinds_{mask}{part}.json"))
        for part in ("", "_dither")
        for mask in masks
    ]
    return "\n".join(out) + "\n" + "".join(sources)


def torch_cpu():
    """Forward + backward against PyTorch on a CPU, medians of interleaved runs."""
    r = record("speed/torch_cpu.json")
    out = [
        "| case | implementation | forward, ms | backward, ms | both, ms | times ours |",
        "|---|---|---|---|---|---|",
    ]
    for e in r["results"]:
        times = " | ".join(f"{e[x]['median_ms']:.0f}" for x in ("forward", "backward", "both"))
        out.append(
            f"| {e['case']} | {e['implementation']} | {times} | "
            f"{e['both']['ratio_to_sagebwd']:.2f} |"
        )
    where = r["machine"]
    return (
        "\n".join(out)
        + f"\n\n{where['cpu']}, {where['threads']} threads, torch {where['torch']}.\n"
        + source(r)
    )


OURS, FA2, CUDNN = "sagebwd bf16", "torch flash bf16", "torch cudnn bf16"
FA3 = "flash-attn 3 bf16"


def speeds(results, direction, wanted="vectorwise"):
    """Of the runs with a recipe: case -> implementation -> milliseconds. A peer that could not run
    a case has no entry. Nor has cuDNN with packed documents: PyTorch hands it nested tensors in a
    way that takes twenty times as long as the attention itself."""
    times = {}
    for e in results:
        *case, recipe = e["case"].split()
        slow = "documents" in case and e["implementation"] == CUDNN
        if recipe == wanted and not slow:
            plain = f"hk{case[1][1:]}"  # as many key heads as heads: not worth a word
            name = " ".join(w for w in case if w != plain)
            times.setdefault(name, {})[e["implementation"]] = e[direction]["median_ms"]
    return times


def cell(value, digits=2):
    return "–" if value is None else f"{value:.{digits}f}"


def ratio(times, peer):
    """How many times as long as ours a peer takes."""
    return times[peer] / times[OURS] if peer in times else None


def at(r):
    """Where a record of a GPU was made."""
    return f"\n{r['machine']['gpu']}, torch {r['machine']['torch']}.\n" + source(r)


def h200():
    """Forward + backward on a GPU against FlashAttention and cuDNN."""
    r = record("gpu/speed.json")
    paper = speeds(r["results"], "both", "paper")
    out = [
        "| case | `vectorwise`, ms | `paper`, ms | FlashAttention-2, ms | FlashAttention-3, ms | "
        "cuDNN, ms | FlashAttention-2 / `vectorwise` | FlashAttention-3 / `vectorwise` | "
        "cuDNN / `vectorwise` |",
        "|---|" + "---|" * 8,
    ]
    for case, times in speeds(r["results"], "both").items():
        peers = (FA2, FA3, CUDNN)
        all_ = (times[OURS], paper[case][OURS], *(times.get(p) for p in peers))
        ratios = [ratio(times, p) for p in peers]
        out.append(f"| {case} | {' | '.join(cell(x) for x in (*all_, *ratios))} |")
    return "\n".join(out) + "\n" + at(r)


def h200_sustained():
    """The speed of each direction relative to cuDNN's, in bursts and under sustained load."""
    r = record("gpu/speed.json")
    if "sustained" not in r:
        return "Not recorded yet: `tools/gpu_check speed` does it.\n"
    directions = ("forward", "backward", "both")
    runs = {"bursts": r["results"], "sustained": r["sustained"]["results"]}
    out = [
        "| case | "
        + " | ".join(f"{direction}, {run}" for direction in directions for run in runs)
        + " | both, sustained, ms | both, sustained, by FlashAttention-3's |",
        "|---|" + "---|" * 8,
    ]
    times = {(d, run): speeds(runs[run], d) for d in directions for run in runs}
    for case, ours in times["both", "sustained"].items():
        if CUDNN not in ours:
            continue
        ratios = [ratio(t[case], CUDNN) for t in times.values()]
        last = (ours[OURS], ratio(ours, FA3))
        out.append(f"| {case} | {' | '.join(cell(x) for x in (*ratios, *last))} |")
    return "\n".join(out) + "\n" + at(r)


def hopper():
    """Both directions under sustained load."""
    times = speeds(record("gpu/speed.json")["sustained"]["results"], "both")
    out = [
        "| tokens | cuDNN, head dim 128: full, causal | cuDNN, head dim 64: full, causal | "
        "FlashAttention-3, full: head dim 128, 64 |",
        "|---|---|---|---|",
    ]
    for tokens in (16384, 4096, 1024):
        # All of these have 32768 tokens of 2048 channels.
        case = lambda d, mask: f"b{32768 // tokens} h{2048 // d} n{tokens} d{d} {mask} bf16"
        columns = [[(CUDNN, case(d, mask)) for mask in ("full", "causal")] for d in (128, 64)] + [
            [(FA3, case(d, "full")) for d in (128, 64)]
        ]
        cells = [", ".join(cell(ratio(times[c], peer)) for peer, c in two) for two in columns]
        out.append(f"| {tokens} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


PROFILED = {
    "cuda-sm80": {
        "forward": ("forward", "vectorwise"),
        "`fused` of `vectorwise`": ("fused", "vectorwise"),
        "`fused` of `paper`": ("fused", "paper"),
        "`fused` of `vectorwise`, deterministic": ("fused, in turn", "vectorwise"),
        "`fused` of `paper`, deterministic": ("fused, in turn", "paper"),
        "operands of the forward": ("forward's operands", "vectorwise"),
        "operands of the backward": ("backward's operands", "vectorwise"),
        "`query_sums`": ("query_sums", "vectorwise"),
    },
    "cuda-sm90": {
        "forward": ("forward", "vectorwise"),
        "backward": ("backward", "vectorwise"),
        "backward, in turn": ("backward, in turn", "vectorwise"),
        "codes": ("forward's operands", "vectorwise"),
        "queries": ("backward's operands", "vectorwise"),
        "`query_sums`": ("query_sums", "vectorwise"),
    },
}


def profile(implementation):
    """What the profiler says of each kernel, head dim 128 and 64."""
    r = record("gpu/profile.json")
    out = [
        "| kernel | ms, d 128 / d 64 | instructions per score | instructions per cycle (of 4) | "
        "tensor pipe | shared memory | memory | cycles a warp waits between instructions |",
        "|---|" + "---|" * 7,
    ]
    scores = {128: 8 * 16 * 4096**2, 64: 8 * 32 * 4096**2}
    for name, (kernel, recipe) in PROFILED[implementation].items():
        found = {}
        for e in r["results"]:
            words = e["case"].split()
            if (e["implementation"], e["kernel"], words[-1]) == (implementation, kernel, recipe):
                found[128 if "d128" in words else 64] = e
        two = [found[128], found[64]]
        pair = lambda of, digits=0, two=two: " / ".join(f"{of(e):.{digits}f}" for e in two)
        share = lambda what, pair=pair: pair(lambda e: e[what]) + " %"
        visits_scores = "operands" not in kernel and kernel != "query_sums"
        waits = [key for key in two[0] if key.startswith("stalled: ")]
        most = sorted(waits, key=lambda key: -sum(e.get(key, 0) for e in two))[:2]
        stalls = [
            f"{key.removeprefix('stalled: ').replace('_', ' ')} "
            + pair(lambda e, key=key: e.get(key, 0), 1)
            for key in most
        ]
        per_score = [f"{32 * e['instructions'] / scores[d]:.0f}" for d, e in found.items()]
        cells = (
            name,
            pair(lambda e: e["nanoseconds"] / 1e6, 2),
            " / ".join(per_score) if visits_scores else "",
            pair(lambda e: e["instructions per cycle"], 1),
            share("tensor pipe %") if two[0]["tensor pipe %"] > 5 else "",
            share("shared memory %"),
            share("memory %"),
            ", ".join(stalls),
        )
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n" + at(r)


def eager():
    """Small eager calls: wall time per call, and that of the fastest attention of PyTorch."""
    if not (ROOT / "results/gpu/eager.json").exists():
        return "Not recorded yet: `tools/gpu_check eager` does it.\n"
    r = record("gpu/eager.json")
    out = ["| case | forward, µs | PyTorch, µs | times PyTorch | both, µs | PyTorch, µs | "]
    out[0] += "times PyTorch |"
    out.append("|---|" + "---|" * 6)
    forward, both = (speeds(r["results"], d) for d in ("forward", "both"))
    for case in both:
        cells = []
        for times in (forward[case], both[case]):
            peers = {name: t for name, t in times.items() if name != OURS}
            best = min(peers, key=peers.get, default=None)
            shown = "– | –"
            if best is not None:
                name = best.removeprefix("torch ").removesuffix(" bf16")
                shown = f"{1e3 * peers[best]:.0f} ({name}) | {times[OURS] / peers[best]:.2f}"
            cells.append(f"{1e3 * times[OURS]:.0f} | {shown}")
        out.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n" + at(r)


def sparse():
    """SLA2 and block lists by sparsity, and how many times as long their peers take."""
    if not (ROOT / "results/gpu/sparse.json").exists():
        return "Not recorded yet: `tools/gpu_check sparse` does it.\n"
    r = record("gpu/sparse.json")
    times = {
        (e["case"], e["implementation"], e["sparsity"]): [
            e[direction]["median_ms"] for direction in ("forward", "backward")
        ]
        for e in r["results"]
    }
    pair = lambda values: " / ".join(cell(x) for x in values) if values else "–"

    def over(theirs, ours):
        return [a / b for a, b in zip(theirs, ours)] if theirs and ours else None

    out = [
        "| case | sparsity | SLA2, ms | cuDNN / SLA2 | FlashAttention-2 / SLA2 | "
        "FlexAttention / SLA2 | sparse part, ms | of dense · (1 − sparsity) |",
        "|---|" + "---|" * 7,
    ]
    for case, name, sparsity in times:
        if name != "sagebwd sla2":
            continue
        at_ = lambda name, share=None: times.get((case, name, share))  # noqa: B023
        whole, part = at_("sagebwd sla2", sparsity), at_("sagebwd sparse", sparsity)
        flex, dense = at_("flex", sparsity), at_("sagebwd dense cuda-sm80")
        share = [(1 - sparsity) * t for t in dense or ()]
        ratios = [over(p, whole) for p in (at_("torch cudnn"), at_("torch flash"), flex)]
        cells = [whole, *ratios, part, over(part, share)]
        shown = " | ".join(pair(x) for x in cells)
        out.append(f"| {case} | {100 * sparsity:g} % | {shown} |")
    return "\n".join(out) + "\n" + at(r)


ARMS = {
    "fpa": "16-bit attention",
    "paper": "`paper`",
    "dither": "`paper`, dithered",
    "vectorwise": "`vectorwise`",
}


def bias():
    """Error of accumulated weight gradients at a trained checkpoint."""
    r = record("train/bias_45m.json")
    names = {
        **ARMS,
        "dither_dQ": "`vectorwise`, dQ dithered",
        "vdither": "`vectorwise`, dithered",
        "noise": "noise of the gradient itself",
    }
    rows = r["bias"]["rows"]
    pick = [rows[0], rows[-1]]
    count = lambda n: f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K"
    out = [
        "| | "
        + " | ".join(f"{w}, {count(row['tokens'])}" for w in ("Wq", "Wk", "Wv") for row in pick)
        + " |",
        "|---|" + "---|" * 6,
    ]
    for key, label in names.items():
        if key not in rows[0]["errors"]:
            continue
        cells = " | ".join(
            f"{row['errors'][key][w]['all']:.3f}" for w in ("Wq", "Wk", "Wv") for row in pick
        )
        out.append(f"| {label} | {cells} |")
    return "\n".join(out) + "\n" + source(r)


MODEL_ARMS = {
    "16-bit": "16-bit attention",
    "paper": "`paper`",
    "vectorwise": "`vectorwise`",
    "dither_dQ": "`vectorwise`, dQ dithered",
}


def real_model():
    """Errors inside of a trained model: its layers, and its weight gradients."""
    layers, gradients = (record(f"model/smollm2_cpu/{n}.json") for n in ("layers", "gradients"))
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj")
    out = [
        "| | O | dQ | dK | dV | loss | Wq | Wk | Wv | Wo | worst layer |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, label in MODEL_ARMS.items():
        tensors, whole = layers["totals"][key], gradients["arms"][key]
        cells = [f"{100 * tensors[t]:.1f} %" for t in ("O", "dQ", "dK", "dV")]
        cells.append(f"{whole['loss_difference']:+.4f}")
        cells += [f"{100 * whole['errors'][k]['all']:.1f} %" for k in kinds]
        cells.append(f"{100 * max(whole['errors'][k]['worst'] for k in kinds):.0f} %")
        out.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n" + source(layers) + source(gradients)


def leak():
    """A model that learns to read the future, or does not."""
    figures = record("leak/leak.json")
    out = [
        "| attention | at the start | loss, nats | the same weights with exact attention |",
        "|---|---|---|---|",
    ]
    for row in figures["rows"]:
        length = row["planted_length"]
        start = row["words"] + (f", {length:.0f} times longer" if length else "")
        name = f"`{row['arm']}`" if length else row["arm"]
        cells = [
            f"{row['above_best']:+.4f} ± {row['deviation']:.4f}",
            f"{row['above_best_exact']:+.4f}",
        ]
        out.append(f"| {name} | {start} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n" + source(figures)


def leaks():
    """Which attentions let later tokens change earlier outputs."""
    figures = record("leak/leaks.json")
    out = [
        "| attention | its error | later tokens become others, zero, or are not there "
        "| 20 times as large | NaN or Inf | the inputs of TransformerEngine#3248 |",
        "|---|---|---|---|---|---|",
    ]
    for row in figures["rows"]:
        cells = [change["words"] for change in row["changes"].values()]
        name = f"{row['attention']} ({row['words']})"
        out.append(f"| {name} | {100 * row['error']:.2g} % | {' | '.join(cells)} |")
    return "\n".join(out) + "\n" + source(figures)


def by_name(r):
    return {run["name"]: run for run in r["runs"]}


def difference(run, base):
    return f"{run['summary']['eval_loss'] - base['summary']['eval_loss']:+.4f}"


# The runs of the tokens-per-step experiment, and what is said of each.
TRAINED = {
    "2.1M_qknorm_seed0": "QK-norm",
    "2.1M_decisive_seed1": "QK-norm, another seed",
    "2.1M_plain_seed0": "no QK-norm",
    "260K_qknorm_seed0": "QK-norm",
    "260K_plain_seed0": "no QK-norm",
}


def trained(name):
    """Arms of an experiment of TRAINED, each with the full-precision arm it is compared with: of
    today's record, and of the one before it what that does not have."""
    paths = (f"train/paper/tokens_per_step_{name}.json", f"train/tokens_per_step_{name}.json")
    found = {}
    for runs in map(by_name, map(record, paths)):
        found |= {arm: (run, runs["fpa"]) for arm, run in runs.items()}
    return found


def tokens_per_step():
    """Eval loss after the same tokens under every kind of attention."""
    experiments = [trained(name) for name in TRAINED]
    steps = [arms["fpa"][0]["summary"]["steps"] for arms in experiments]
    out = [
        "| | "
        + " | ".join(
            f"{n} x {name.split('_')[0]}, {words}"
            for n, (name, words) in zip(steps, TRAINED.items())
        )
        + " |",
        "|---|" + "---|" * len(TRAINED),
    ]
    labels = {"fpa": ARMS["fpa"], "again": "16-bit attention again, as a control", **ARMS}
    for arm, label in labels.items():
        cells = []
        if not any(arm in arms for arms in experiments):
            continue
        for arms in experiments:
            if arm == "fpa":
                cells.append(f"{arms['fpa'][0]['summary']['eval_loss']:.4f}")
            else:
                cells.append(difference(*arms[arm]) if arm in arms else "")
        out.append(f"| {label} | " + " | ".join(cells) + " |")
    r = record("train/tokens_per_step_2.1M_qknorm_seed0.json")
    older = record("train/paper/tokens_per_step_2.1M_qknorm_seed0.json")
    general = lambda r: source(
        {**r, "command": r["command"].replace("2.1M qknorm 0", "TOKENS ARMS SEED")}
    )
    return (
        "\n".join(out)
        + f"\n\n{r['machine']['gpu']}.\n"
        + general(r)
        + "\n`paper` against 16-bit attention of its own run:\n"
        + general(older)
    )


def tokens_per_step_45m():
    """The same for the 45M model on GPT-2 tokens."""
    r = record("train/tokens_per_step_45m_2.1M_decisive_seed0.json")
    runs = by_name(r)
    out = ["| | steps of 2.1M tokens | eval loss | against 16-bit attention |", "|---|---|---|---|"]
    for arm, label in ARMS.items():
        if arm in runs:
            s = runs[arm]["summary"]
            gap = "" if arm == "fpa" else difference(runs[arm], runs["fpa"])
            out.append(f"| {label} | {s['steps']} | {s['eval_loss']:.4f} | {gap} |")
    return "\n".join(out) + f"\n\n{r['machine']['gpu']}.\n" + source(r)


def finetune():
    """Held-out loss of a real model after a short fine-tuning."""
    r = record("model/smollm2_h200/finetune.json")
    plan, out = r["plan"], ["| | before | after | against 16-bit attention |", "|---|---|---|---|"]
    for arm, s in r["summary"].items():
        label = {"exact": "exact attention", **MODEL_ARMS}[arm]
        gap = f"{s['difference_mean']:+.4f} ± {s['difference_scatter']:.4f}"
        gap = "" if arm == "16-bit" else gap
        after = f"{s['after']:.4f} ± {s['scatter']:.4f}"
        out.append(f"| {label} | {s['before']:.4f} | {after} | {gap} |")
    seeds = len({run["seed"] for run in r["runs"]})
    words = f"{plan['steps']} steps of {plan['batch']} x {plan['context']} tokens, {seeds} seeds"
    return "\n".join(out) + f"\n\n{r['machine']['gpu']}; {words}.\n" + source(r)


def ablation():
    """What smoothing and single matmuls are worth, to the loss and to the gradients."""
    parts = [
        (
            "smoothing",
            {"none": "no smoothing", "k": "K smoothed (the recipe)", "qk": "Q and K smoothed"},
        ),
        (
            "lift",
            {
                "int8": "all six in INT8 (the recipe)",
                "S": "S lifted",
                "O": "O lifted",
                "dV": "dV lifted",
                "dQ": "dQ lifted",
                "dK": "dK lifted",
            },
        ),
    ]
    out = [
        "| `paper` with | eval loss against 16-bit | O | dQ | dK | dV |",
        "|---|---|---|---|---|---|",
    ]
    for name, labels in parts:
        r = record(f"train/ablation_{name}_paper.json")
        runs = by_name(r)
        for key, label in labels.items():
            errors = [
                statistics.median(a["rel_l2"][x] for a in runs[key]["audits"])
                for x in ("O", "dQ", "dK", "dV")
            ]
            out.append(
                f"| {label} | {difference(runs[key], runs['fpa'])} | "
                + " | ".join(f"{e:.3f}" for e in errors)
                + " |"
            )
    return (
        "\n".join(out)
        + "\n"
        + source({**r, "command": r["command"].replace("lift", "smoothing|lift")})
    )


def sla2():
    """A video model after its attention was changed: losses, and whether they tell arms apart."""
    if not (ROOT / "results/sla2/video.json").exists():
        return "Not recorded yet: `runs/sla2.sh` does it.\n"
    r = record("sla2/video.json")
    out = [r["about"] + " " + r["plan"] + " Means and standard deviations over seeds.", ""]
    for keep, arms in r["summary"].items():
        titles = next(iter(arms.values()))
        out.append(f"| {100 * float(keep):g} % of the blocks seen | {' | '.join(titles)} |")
        out.append("|---|" + "---|" * len(titles))
        for arm, figures in arms.items():
            digits = lambda name: 4 if name.startswith("loss") else 2
            cells = [f"{m:.{digits(n)}f} ± {d:.{digits(n)}f}" for n, (m, d) in figures.items()]
            out.append(f"| `{arm}` | {' | '.join(cells)} |")
        out.append("")
    for check in r["checks"]:
        result = "yes" if check["passed"] else "**no**"
        out.append(f"- {result}: {100 * float(check['keep']):g} % seen, {check['what']}.")
    return "\n".join(out) + "\n" + at(r)


WAYS = {
    "wheel": "`pip install` of a finished wheel",
    "cpu": "`pip install .` for the CPU",
    "gpu": "`pip install .` for the CPU and one GPU, Hopper",
}


def installs():
    """Processor time of the ways to install, and the time that this takes on four cores."""
    out = ["| way | processor time | on four cores, at best |", "|---|---|---|"]
    words = lambda seconds: f"{seconds / 60:.1f} min" if seconds > 60 else f"{seconds:.1f} s"
    records = [
        record(f"install/{path.name}") for path in sorted((ROOT / "results/install").iterdir())
    ]
    for way in (way for r in records for way in r["ways"]):
        seconds = way["processor_seconds"]
        out.append(f"| {WAYS[way['way']]} | {words(seconds)} | {words(seconds / 4)} |")
    return "\n".join(out) + "\n" + "".join(map(source, records))


def throughput():
    """Whole training steps of the 325M model."""
    r = record("train/throughput_325m.json")
    out = [
        "| context | | tokens per second | MFU | peak memory, GiB | kept of a sequence, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for run in sorted(r["runs"], key=lambda run: run["config"]["context"]):
        s, arm = run["summary"], run["name"].split("_")[0]
        out.append(
            f"| {run['config']['context']} tokens | {ARMS[arm]} | {s['tokens_per_second']:.0f} | "
            f"{100 * run['mfu']:.1f} % | {s['peak_memory'] / (1 << 30):.1f} | "
            f"{s['activation_bytes'] / (1 << 30):.2f} |"
        )
    where = r["machine"]
    return "\n".join(out) + f"\n\n{where['gpu']}, torch {where['torch']}.\n" + source(r)


SUMMARISED = ("vectorwise", "paper")


def summary():
    """The README's: accuracy, bias, training, speed of forward and backward from 4096 tokens on."""
    gaussian = {
        (c["recipe"], c["sigma"]): c["tensors"] for c in record("accuracy/gaussian.json")["cases"]
    }
    error = lambda recipe: f"{100 * gaussian[recipe, 1]['dQ']['rel_l2']:.1f} %"

    last = record("train/bias_45m.json")["bias"]["rows"][-1]["errors"]
    grown = lambda arm: f"{100 * last[arm]['Wq']['all']:.1f} %"

    cpu = [
        e["both"]["ratio_to_sagebwd"]
        for e in record("speed/torch_cpu.json")["results"]
        if e["implementation"].startswith("torch")
    ]

    gpu = record("gpu/speed.json")

    def against(peer, recipe, results=gpu["results"]):
        """Speed on a GPU relative to a peer, from 4096 tokens on."""
        found = speeds(results, "both", recipe)
        ratios = [
            ratio(times, peer)
            for case, times in found.items()
            if (" n4096 " in case or " n16384 " in case) and peer in times
        ]
        return f"{min(ratios):.2f}–{max(ratios):.2f} ×"

    experiments = [trained(name) for name in TRAINED]
    loss = lambda run: run["summary"]["eval_loss"]
    worst = lambda arm: max(
        loss(arms[arm][0]) - loss(arms[arm][1]) for arms in experiments if arm in arms
    )

    sustained = against(CUDNN, "vectorwise", gpu["sustained"]["results"])
    rows = [
        ("error of dQ against FP64, Gaussian inputs", *map(error, SUMMARISED)),
        (
            f"error of Wq's gradient summed over 1M tokens (16-bit: {grown('fpa')})",
            grown("vectorwise"),
            grown("paper"),
        ),
        (
            "eval loss above 16-bit attention, 629M tokens, worst of five runs ¹",
            f"{worst('vectorwise'):+.4f}",
            f"{worst('paper'):+.4f}",
        ),
        (
            "speed on an H200 ÷ cuDNN (under sustained load)",
            f"{against(CUDNN, 'vectorwise')} ({sustained})",
            against(CUDNN, "paper"),
        ),
        (
            "speed on an H200 ÷ FlashAttention-2",
            against(FA2, "vectorwise"),
            against(FA2, "paper"),
        ),
        ("speed on a CPU ÷ PyTorch", f"{min(cpu):.1f}–{max(cpu):.1f} ×", ""),
    ]
    out = ["| | `vectorwise` (default) | `paper` |", "|---|---|---|"]
    return "\n".join(out + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


TABLES = {
    "summary": summary,
    "gaussian": lambda: accuracy("gaussian"),
    "hard": lambda: accuracy("hard"),
    "kinds": kinds,
    "real_model": real_model,
    "leak": leak,
    "leaks": leaks,
    "torch_cpu": torch_cpu,
    "h200": h200,
    "h200_sustained": h200_sustained,
    "hopper": hopper,
    "profile_sm80": lambda: profile("cuda-sm80"),
    "profile_sm90": lambda: profile("cuda-sm90"),
    "eager": eager,
    "sparse": sparse,
    "bias": bias,
    "tokens_per_step": tokens_per_step,
    "tokens_per_step_45m": tokens_per_step_45m,
    "finetune": finetune,
    "ablation": ablation,
    "throughput": throughput,
    "installs": installs,
    "sla2": sla2,
}


def without_empty_columns(text):
    """A peer that was not installed has no figures: its columns are left out."""
    lines = text.split("\n")
    rows = [i for i, line in enumerate(lines) if line.startswith("|")]
    cells = [lines[i].strip("|").split("|") for i in rows]
    if len(cells) < 3 or len({len(c) for c in cells}) != 1:
        return text
    empty = lambda c: not c.replace(",", "").replace("–", "").strip() and "–" in c
    kept = [k for k in range(len(cells[0])) if not all(empty(row[k]) for row in cells[2:])]
    for i, row in zip(rows, cells):
        lines[i] = "|" + "|".join(row[k] for k in kept) + "|"
    return "\n".join(lines)


def main():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        made = re.sub(
            r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
            lambda m: m[1] + without_empty_columns(TABLES[m[2]]()) + m[3],
            text,
            flags=re.S,
        )
        if "--check" not in sys.argv[1:]:
            page.write_text(made)
        elif made != text:
            sys.exit(f"{page.relative_to(ROOT)} differs from results/: run tools/tables.py")


if __name__ == "__main__":
    main()
