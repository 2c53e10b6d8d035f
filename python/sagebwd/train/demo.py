# SPDX-License-Identifier: Apache-2.0
"""``make demo``: trains a small Llama with full-precision attention, `paper` and `vectorwise`, side
by side, and writes one page with the results. It takes some minutes on a CPU. On a GPU the model is
bigger.

    python -m sagebwd.train.demo [--accuracy FILE] [--out DIR] [options of sagebwd.train]

A second full-precision run has other seeds. How far the two end apart, in loss and in speed, is the
noise that the recipes are compared with. After training, the full-precision model shows how the
error of gradients grows or shrinks as they are added up over more tokens. FILE is the record of
``sagebwd report``: accuracy on easy and hard inputs, for the same page.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from .__main__ import main as train
from .bias import measure
from .compare import make_report
from .config import count
from .errors import BadInput, exit_code, figures_of, writing
from .files import read_text, write_text
from .json_text import dumps, loads
from .report.accuracy_card import accuracy_card
from .report.bias_card import verdict

ARMS = "fpa,fpa-again=fpa seed=1 data_seed=1,paper,vectorwise"
_CPU = [
    "--preset", "demo", "--log-every", "10", "--eval-every", "10", "--audit-every", "10",
    "--eval-tokens", "16K",
]  # fmt: skip
# This model learns enough to write text worth reading.
_GPU = [
    "--preset", "45m", "--steps", "300", "--warmup", "30", "--tokens-per-step", "128K",
    "--log-every", "20", "--eval-every", "25", "--audit-every", "10", "--eval-tokens", "512K",
    "--sample-tokens", "240", "--prompt", "def ",
]  # fmt: skip
# In float32 `fpa` is exact and has no error to show.
_BIAS = {"cpu": ("paper,vectorwise", "8K,16K,32K,64K"),
         "cuda": ("fpa,paper,vectorwise", "16K,64K,256K,1M")}  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m sagebwd.train.demo", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--accuracy", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    args, rest = parser.parse_known_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = ["--compare", ARMS, "--out", str(args.out), *(_GPU if device == "cuda" else _CPU),
             "--overwrite", *rest]  # fmt: skip

    def work():
        with writing(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
            for name in ("accuracy", "bias"):  # of an earlier demo
                (args.out / f"{name}.json").unlink(missing_ok=True)
        if args.accuracy:
            keep_accuracy(args.accuracy, args.out)
        code = train(words)
        if code:
            return code
        return add_bias(args.out, *_BIAS[device], " ".join(["python -m sagebwd.train", *words]))

    return exit_code("sagebwd.train.demo", work)


def keep_accuracy(file, out):
    """Puts the record of ``sagebwd report`` beside the runs, with the way to its own page."""
    try:
        record = loads(read_text(file))
    except (OSError, ValueError) as error:
        raise BadInput(f"accuracy: {file} cannot be read ({error})") from None
    with figures_of(f"accuracy: {file}"):
        record.pop("page", None)  # what is on it; here only its address is wanted
        accuracy_card(record)  # before the training that ends with it
    page = file.with_suffix(".html")
    if page.exists():
        record["page"] = Path(os.path.relpath(page, out)).as_posix()
    with writing(out):
        write_text(out / "accuracy.json", dumps(record) + "\n")


def add_bias(out, recipes, tokens, command):
    """Measures at the full-precision model how gradient errors add up, and writes the page anew."""
    print("\nDoes the gradient error average out over a batch?")
    for record in measure(out / "fpa", recipes, [count(t) for t in tokens.split(",")]):
        pass
    with writing(out):
        write_text(out / "bias.json", dumps(record, indent=1) + "\n")
    finished = [p.parent for p in sorted(out.glob("*/summary.json"))]
    names = [arm.split("=")[0] for arm in ARMS.split(",")]
    order = [out / n for n in names if out / n in finished]
    _, page = make_report(order, out, command)
    print(f"{verdict(record).replace('`', '')}\nThe page with all of this is {page}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
