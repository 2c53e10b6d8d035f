#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md from the records under results/. With --check it only compares.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def record(path):
    return json.loads((ROOT / "results" / path).read_text())


def source(r):
    state = "" if r["clean"] else " with changes"
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


def torch_cpu():
    """Forward + backward against PyTorch on a CPU, medians of interleaved runs."""
    r = record("speed/torch_cpu.json")
    out = ["| case | implementation | forward, ms | backward, ms | both, ms | times ours |",
           "|---|---|---|---|---|---|"]
    for e in r["results"]:
        times = " | ".join(f"{e[x]['median_ms']:.0f}" for x in ("forward", "backward", "both"))
        out.append(f"| {e['case']} | {e['implementation']} | {times} | "
                   f"{e['both']['ratio_to_sagebwd']:.2f} |")
    where = r["machine"]
    return "\n".join(out) + f"\n\n{where['cpu']}, {where['threads']} threads, torch {where['torch']}.\n" + source(r)


def h200():
    """Forward + backward on a GPU against PyTorch's FlashAttention-2 and cuDNN."""
    r = record("gpu/speed.json")
    both = {}
    for e in r["results"]:
        *case, recipe = e["case"].split()
        both.setdefault(" ".join(w for w in case if not w.startswith("hk")), {}).setdefault(
            recipe, {})[e["implementation"]] = e["both"]["median_ms"]
    out = ["| case | `vectorwise`, ms | `paper`, ms | FlashAttention-2, ms | cuDNN, ms | "
           "FlashAttention-2 / `vectorwise` |", "|---|---|---|---|---|---|"]
    for case, recipes in both.items():
        ours, peers = recipes["vectorwise"]["sagebwd bf16"], recipes["vectorwise"]
        fa2, cudnn = peers["torch flash bf16"], peers["torch cudnn bf16"]
        out.append(f"| {case} | {ours:.2f} | {recipes['paper']['sagebwd bf16']:.2f} | {fa2:.2f} | "
                   f"{cudnn:.2f} | {fa2 / ours:.2f} |")
    where = r["machine"]
    return "\n".join(out) + f"\n\n{where['gpu']}, torch {where['torch']}.\n" + source(r)


def bias():
    """Error of accumulated weight gradients at a trained checkpoint."""
    r = record("train/bias_45m.json")
    names = {"fpa": "16-bit attention", "paper": "`paper`", "dither": "`paper`, dithered",
             "vectorwise": "`vectorwise`", "vdither": "`vectorwise`, dithered",
             "noise": "noise of the gradient itself"}
    rows = r["bias"]["rows"]
    pick = [rows[0], rows[-1]]
    count = lambda n: f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K"
    out = ["| | " + " | ".join(f"{w}, {count(row['tokens'])}" for w in ("Wq", "Wk", "Wv")
                               for row in pick) + " |", "|---|" + "---|" * 6]
    for key, label in names.items():
        cells = " | ".join(f"{row['errors'][key][w]['all']:.3f}" for w in ("Wq", "Wk", "Wv")
                           for row in pick)
        out.append(f"| {label} | {cells} |")
    return "\n".join(out) + "\n" + source(r)


TABLES = {
    "gaussian": lambda: accuracy("gaussian"),
    "hard": lambda: accuracy("hard"),
    "torch_cpu": torch_cpu,
    "h200": h200,
    "bias": bias,
}


def main():
    page = ROOT / "README.md"
    text = page.read_text()
    made = re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda m: m[1] + TABLES[m[2]]() + m[3], text, flags=re.S)
    if "--check" in sys.argv[1:]:
        if made != text:
            sys.exit("README.md differs from results/: run tools/tables.py")
    else:
        page.write_text(made)


if __name__ == "__main__":
    main()
