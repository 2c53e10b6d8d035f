# SPDX-License-Identifier: Apache-2.0
"""The errors of INT8 attention against float64 in every layer of a checkpoint, on one held-out
sequence.

    python -m sagebwd.train.layers RUN                          paper and vectorwise
    python -m sagebwd.train.layers RUN --arms "vectorwise lift=dQ,dK" --captures layers.safetensors

``--captures`` keeps q, k, v and dO of all layers for ``sagebwd trace --from``, which shows every
intermediate and which matmul costs which error.
"""

import argparse
import sys

from ..suggest import Parser
from ..tools.diagnosis import diagnose
from .compare import parse_arms
from .data import Batches, evaluation_windows
from .errors import exit_code
from .load import load_model


def layer_errors(run, arms, tokens=1024, captures=None, **changes):
    """{arm: Report} of the run's newest checkpoint; ``tokens`` at most, because float64 attention
    holds [heads, tokens, tokens]."""
    loaded = load_model(run, **changes)
    held_out = Batches(loaded.source.val, loaded.config.context, 0, loaded.device)
    rows = held_out.windows(evaluation_windows(held_out, 1, 1)[:1])[:, : tokens + 1]
    batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    loaded.model.set_attention(parse_arms("fpa", loaded.config)["fpa"])
    reports = {}
    for name, arm in parse_arms(arms, loaded.config).items():
        with loaded.autocast():
            reports[name] = diagnose(
                loaded.model, batch, loss=lambda y: y, recipe=arm.make_recipe(), file=None,
                save_to=captures,
            )  # fmt: skip
        captures = None  # the same for every arm
    return reports


def main(arguments=None):
    parser = Parser(
        prog="python -m sagebwd.train.layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="directory of a run, or one checkpoint")
    parser.add_argument("--arms", default="paper,vectorwise", help="as in sagebwd.train --compare")
    parser.add_argument("--tokens", type=int, default=1024, help="of the sequence (default 1024)")
    parser.add_argument("--captures", metavar="FILE", help="keep the tensors (safetensors)")
    parser.add_argument("--data", help="instead of the run's own")
    args = parser.parse_args(arguments)
    changes = {} if args.data is None else {"data": args.data}

    def work():
        reports = layer_errors(args.run, args.arms, args.tokens, args.captures, **changes)
        for name, report in reports.items():
            print(f"{name}\n{report}\n")

    return exit_code("sagebwd.train.layers", work)


if __name__ == "__main__":
    sys.exit(main())
