# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama with INT8 or full-precision attention.

  python -m sagebwd.train                                   a demo model, on the sources of Python
  python -m sagebwd.train --attention fpa                   the same in full precision
  python -m sagebwd.train --preset 124m --data fineweb/ --tokens-per-step 524K
  python -m sagebwd.train --compare fpa,paper,vectorwise    side by side, with a report
  python -m sagebwd.train --report DIR DIR ... [--out DIR]  a report of runs that are done
  torchrun --nproc-per-node 8 -m sagebwd.train --parallel fsdp ...

A run writes to the directory --out: config.json, log.jsonl (every number of every step),
summary.json and checkpoints/. After an interruption, run the same command with --resume auto: the
result is the same to the last bit. A larger --steps then extends a run.

An arm of --compare is a name, alone or with changes: paper, vectorwise, fpa,
"dither=paper rounding=dither", "slow=fpa lr=1e-4". Arms have the same data in the same order and
the same initial weights; they differ only in what they name.

`python -m sagebwd.train.sample RUN --prompt TEXT` shows what a run has learned.
`python -m sagebwd.train.export RUN` turns it into a model for transformers.
"""

import argparse
import sys
import time
from pathlib import Path

from ..suggest import Parser
from .config import FIELDS, check, from_dict, upgraded
from .errors import EXIT_CODES, BadInput, exit_code
from .files import read_text
from .json_text import loads
from .presets import PRESETS


def _parser():
    parser = Parser(
        prog="python -m sagebwd.train",
        usage="python -m sagebwd.train [--preset NAME] [options]",
        description=__doc__,
        epilog=f"{_presets()}\n\n{_exit_codes()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="size (default demo)")
    parser.add_argument("--config", metavar="FILE", help="a config.json instead of a preset")
    parser.add_argument("--compare", metavar="ARMS", help="several arms, one report")
    parser.add_argument("--report", nargs="+", metavar="DIR", help="only a report, of these runs")
    sections = {}
    for name, f in FIELDS.items():
        section = f.metadata["section"]
        if section not in sections:
            sections[section] = parser.add_argument_group(section)
        kind = f.type.__name__
        options = dict(default=argparse.SUPPRESS, help=_help(f, kind))
        flag = "--" + name.replace("_", "-")
        if kind == "bool":
            sections[section].add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            metavar = "|".join(f.metadata["choices"] or ()) or kind.upper()
            sections[section].add_argument(flag, metavar=metavar, **options)
    return parser


def _presets():
    lines = ["presets (layers x width, heads, context, tokens per step, steps):"]
    for name, p in PRESETS.items():
        lines.append(
            f"  {name:5} {p['layers']} x {p['width']}, {p['heads']} heads, context {p['context']}, "
            f"{p['tokens_per_step']} tokens, {p['steps']} steps"
        )
    return "\n".join(lines)


def _exit_codes():
    return "\n".join(["Exit codes:", *(f"  {n:3} {words}" for n, words in EXIT_CODES.items())])


def _help(f, kind):
    if f.name in PRESETS["demo"]:
        shown = " (by preset)"
    elif kind == "bool":
        shown = f" (default {'on' if f.default else 'off'})"
    else:
        shown = f" (default {f.default})" if f.default != "" else ""
    return (f.metadata["help"] + shown).replace("%", "%%")


def _read_config(path):
    try:
        values = loads(read_text(path))
    except OSError as error:
        raise BadInput(f"config: {path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise BadInput(f"config: {path} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise BadInput(f"config: {path} is not a JSON object of fields")
    return upgraded(values)


def _config(args):
    base = from_dict(_read_config(args.config) if args.config else PRESETS[args.preset])
    config = from_dict(_given(args), base)
    check(config)
    return config


def _given(args):
    return {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}


def _report(args):
    from .compare import report_runs

    given = _given(args)
    out = given.pop("out", None)
    more = [n for n, there in (("compare", args.compare), ("config", args.config)) if there]
    if more := [*given, *more]:
        flags = ", ".join("--" + name.replace("_", "-") for name in more)
        raise BadInput(f"report: takes directories and --out alone, not {flags}")
    page = report_runs([Path(d) for d in args.report], Path(out) if out else None)
    print(f"the report is {page}")


def main(arguments=None):
    began = time.perf_counter()
    args = _parser().parse_args(arguments)

    def work():
        if args.report:
            return _report(args)
        config = _config(args)
        if args.compare:
            from .compare import compare

            words = sys.argv[1:] if arguments is None else arguments
            compare(config, args.compare, words, began)
        else:
            from .loop import train

            train(config, began=began)

    return exit_code("sagebwd.train", work)


if __name__ == "__main__":
    sys.exit(main())
