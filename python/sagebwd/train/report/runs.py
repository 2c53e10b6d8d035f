# SPDX-License-Identifier: Apache-2.0
"""What a report knows of a run: its configuration, summary and log."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import BadInput
from ..files import read_text
from ..json_text import load_figures
from ..log import read_log

REFERENCE = "fpa"


@dataclass
class Run:
    name: str
    config: dict
    summary: dict
    log: list

    def of(self, kind):
        return [e for e in self.log if e["kind"] == kind]

    def curve(self, x="step", y="loss", kind="step"):
        return [(e[x], e[y]) for e in self.of(kind)]

    @property
    def eval_loss(self):
        return self.summary["eval_loss"]

    @property
    def speed(self):
        return self.summary["tokens_per_second"]

    @property
    def train_loss(self):
        """Mean of the last twentieth of the steps."""
        losses = [y for _, y in self.curve()]
        last = losses[-max(1, len(losses) // 20) :]
        return sum(last) / len(last)

    def sample(self):
        texts = [e["text"] for e in self.of("sample")]
        return texts[-1] if texts else None

    def nats_per_character(self):
        """Held-out loss by characters of text, as the sample shows how long tokens are."""
        written = len(self.sample()) - len(self.config.get("prompt", ""))
        return self.eval_loss * self.config["sample_tokens"] / max(1, written)

    def worst_audit(self):
        """Largest error of a gradient over all audits; None without audits."""
        worst = [max(e["rel_l2"][n] for n in ("dQ", "dK", "dV")) for e in self.of("audit")]
        return max(worst) if worst else None


def read_runs(directories):
    runs = []
    for directory in map(Path, directories):
        try:
            config = load_figures(read_text(directory / "config.json"))
            summary = load_figures(read_text(directory / "summary.json"))
        except (OSError, ValueError) as error:
            raise BadInput(f"{directory}: not the directory of a finished run ({error})") from None
        runs.append(Run(directory.name, config, summary, read_log(directory / "log.jsonl")))
    return runs


def reference_of(runs):
    """The run the others are compared with: the first in full precision, if there is one."""
    return next((r for r in runs if r.config["attention"] == REFERENCE), None)
