# SPDX-License-Identifier: Apache-2.0
"""What a run says: a console line per step, ``log.jsonl`` always, TensorBoard and W&B when asked.
Only the first rank logs."""

import json
import os
from pathlib import Path

from .errors import BadInput


class Log:
    def __init__(self, config, world, label="", stream=None):
        self.config, self.label = config, label
        self.stream = stream  # None: standard output
        self.quiet = not world.is_main
        self.path = Path(config.out) / "log.jsonl"
        self._file = self._tensorboard = self._wandb = None
        if self.quiet:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if config.tensorboard:
            self._tensorboard = _tensorboard(self.path.parent)
        if config.wandb:
            self._wandb = _wandb(config)

    def open(self, from_step):
        """Goes on after the lines of steps before ``from_step``; later ones are of a run that was
        cut off, and are dropped."""
        if self.quiet:
            return
        kept = []
        if from_step > 0 and self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # the line a killed process was writing
                if entry.get("step", 0) <= from_step:
                    kept.append(line)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self.path)
        self._file = open(self.path, "a")

    def say(self, text):
        if not self.quiet:
            print(text, file=self.stream, flush=True)

    def record(self, kind, step, **values):
        """A line of log.jsonl. Numbers are written in full: equal text is equal bits."""
        if self.quiet:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float))}
        if self._tensorboard:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(f"{kind}/{key}", value, step)
        if self._wandb:
            self._wandb.log({f"{kind}/{k}": v for k, v in numbers.items()}, step=step)

    def step(self, step, loss, grad_norm, lr, ms, tokens_per_second, mfu, **more):
        self.record(
            "step", step, loss=loss, grad_norm=grad_norm, lr=lr, ms=ms,
            tokens_per_second=tokens_per_second, mfu=mfu, **more,
        )  # fmt: skip
        if step % self.config.log_every == 0 or step == self.config.steps:
            self.say(
                f"{self.label}step {step:>{len(str(self.config.steps))}}/{self.config.steps} | "
                f"loss {loss:.4f} | norm {grad_norm:.3f} | lr {lr:.2e} | {ms:.0f} ms | "
                f"{'' if mfu is None else f'{100 * mfu:.1f}% MFU | '}{tokens_per_second:.0f} tok/s"
            )

    def close(self):
        for sink in (self._file, self._tensorboard):
            if sink is not None:
                sink.close()
        if self._wandb:
            self._wandb.finish()


def read_log(path):
    """The entries of a log.jsonl."""
    entries = []
    for line in Path(path).read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def _tensorboard(directory):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise BadInput(f"tensorboard: asked for, but it is not installed ({error})") from None
    return SummaryWriter(str(directory / "tensorboard"))


def _wandb(config):
    try:
        import wandb
    except ImportError as error:
        raise BadInput(f"wandb: asked for, but it is not installed ({error})") from None
    from dataclasses import asdict

    return wandb.init(project=config.wandb, config=asdict(config), name=Path(config.out).name)
