# SPDX-License-Identifier: Apache-2.0
"""Text from a trained model.

    python -m sagebwd.train.sample RUN --prompt "def "
    python -m sagebwd.train.sample RUN --prompt "Once" --temperature 0 --tokens 100 --attention fpa

RUN is the directory of a run (its newest checkpoint is taken) or one checkpoint. The same seed
gives the same text on the same machine.
"""

import argparse
import math
import sys

from .compare import BASES
from .errors import exit_code
from .generate import sample
from .load import load_weights


def sample_run(run, prompt, tokens=200, attention="", **options):
    """Text of a run's newest checkpoint, or of one checkpoint. ``options``: those of
    ``generate.sample``, and device and tokenizer."""
    places = {n: options.pop(n) for n in ("device", "tokenizer") if n in options}
    loaded = load_weights(run, **places, **(BASES[attention] if attention else {}))
    loaded.model.eval()
    return sample(loaded.model, loaded.tokenizer, prompt, tokens, loaded.autocast, **options)


def _number(kind, least, most=math.inf):
    def convert(text):
        value = kind(text)
        if not least <= value < most:
            raise ValueError(text)
        return value

    convert.__name__ = f"number from {least} on"  # argparse says it
    return convert


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m sagebwd.train.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="directory of a run, or one checkpoint")
    parser.add_argument("--prompt", default="", help="how the text begins (default: a line break)")
    parser.add_argument("--tokens", type=_number(int, 1), default=200, help="to add (default 200)")
    parser.add_argument(
        "--temperature",
        type=_number(float, 0),
        default=0.8,
        help="0: always the likeliest token (default 0.8)",
    )
    parser.add_argument(
        "--top-k", type=_number(int, 0), default=0, help="choose among so many (default 0: all)"
    )
    parser.add_argument("--seed", type=_number(int, 0, 2**63), default=0, help="default 0")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--attention",
        choices=tuple(BASES),
        default="",
        help="instead of the run's own",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="instead of the run's own")
    args = vars(parser.parse_args(arguments))
    options = {name: value for name, value in args.items() if value is not None}
    return exit_code("sagebwd.train.sample", lambda: print(sample_run(**options)))


if __name__ == "__main__":
    sys.exit(main())
