# SPDX-License-Identifier: Apache-2.0
"""What INT8 attention would do to a checkpoint: errors and leaks of every layer, the loss and the
gradients of a whole step, speed on this machine, and which recipe to take."""

import sys
from dataclasses import dataclass

import torch

from ...recipe import as_recipe
from ...suggest import Parser
from .. import bench
from . import advice, layers, page, speed, text, whole
from .load import BY_HAND, CannotExamine, load


@dataclass
class Findings:
    """All that a page shows."""

    title: str
    machine: str
    examined: list
    whole: whole.Whole
    timed: list
    not_timed: str  # why, or ""
    advice: list


def find(subject, name, device, recipe="vectorwise"):
    """The Findings of a :class:`.load.Subject`."""
    recipe = as_recipe(recipe)
    try:
        examined = layers.examine(subject, recipe)
        stepped = whole.compare(subject, recipe)
    except (TypeError, ValueError) as error:  # the model wants other inputs, or has no attention
        raise CannotExamine(f"{name}: {error}; {BY_HAND}") from error
    shape = speed.shape_of(examined)
    timed, why = speed.measure(shape, device, recipe) if shape else ([], "no call was compared")
    about = bench.machine(device)
    return Findings(
        f"{name}: {type(subject.model).__name__}, {len(examined)} attention calls; "
        f"{subject.words}; {str(next(subject.model.parameters()).dtype)[6:]} on {device}",
        about["gpu"] if device == "cuda" else about["cpu"],
        examined, stepped, timed, why,
        advice.advise(subject.library, examined, stepped, timed),
    )  # fmt: skip


def parsed(arguments):
    parser = Parser(
        prog="sagebwd doctor",
        description=__doc__,
        epilog="Exact attention takes [heads, tokens, tokens] in float64 for every call: keep "
        "--tokens and --pixels small.",
    )
    model = (
        "a checkpoint of transformers or pipeline of diffusers: a directory, or a name on the hub"
    )
    source = "text for a language model; default: English text that Python brings along"
    pixels = "height and width of a pipeline's image or video (256)"
    parser.add_argument("model", help=model)
    parser.add_argument("--html", metavar="PAGE", help="write a page as well")
    parser.add_argument("--recipe", default="vectorwise", help="the recipe to examine")
    parser.add_argument("--text", metavar="FILE", help=source)
    parser.add_argument("--tokens", type=int, default=512, help="of a language model's batch (512)")
    parser.add_argument("--pixels", type=int, default=256, help=pixels)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    args = parser.parse_args(arguments)
    if args.tokens < 16 or args.pixels < 16:
        parser.error("--tokens and --pixels: expected 16 or more")
    return args


def main(arguments=None):
    args = parsed(arguments)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        recipe = as_recipe(args.recipe)
        subject = load(args.model, device, args.tokens, args.pixels, args.text)
        found = find(subject, args.model, device, recipe)
        for line in text.lines(found):
            print(line)
        if args.html:
            with open(args.html, "w", encoding="utf-8") as file:
                file.write(page.page(found))
    except (CannotExamine, OSError, ValueError, ImportError) as error:
        sys.exit(f"sagebwd doctor: {error}")


if __name__ == "__main__":
    main()
