# SPDX-License-Identifier: Apache-2.0
"""What a run says: a console line per step, ``log.jsonl`` always, TensorBoard and W&B when asked.
Only the first rank logs."""

import os
import sys
from pathlib import Path

from .errors import BadInput, writing
from .files import read_bytes, write_text
from .json_text import dumps, load_figures

_LONGEST = 4 << 30  # bytes of a log: millions of steps


class Log:
    def __init__(self, config, world, label="", stream=None):
        self.config, self.label = config, label
        self.stream = stream  # None: standard output
        self.quiet = not world.is_main
        self.path = Path(config.out) / "log.jsonl"
        self._file = self._tensorboard = self._wandb = self._console_error = None
        # Before anything of a former run is touched: what is asked for may not be installed.
        if config.tensorboard and not self.quiet:
            self._tensorboard = _tensorboard(self.path.parent)
        if config.wandb and not self.quiet:
            self._wandb = _wandb(config)

    def open(self, from_step):
        """Continues the log behind the lines of steps before ``from_step``. Later lines, of a run
        that was cut off, are dropped. Returns the entries that stay."""
        if self.quiet:
            return []
        kept = []
        if from_step > 0 and self.path.exists():
            kept = [e for e in read_log(self.path) if e["step"] <= from_step]
        with writing(self.path):
            write_text(self.path, "".join(dumps(e) + "\n" for e in kept))
            self._file = open(self.path, "a", encoding="utf-8")
        return kept

    def say(self, text):
        """The console is a convenience: one that is gone or full does not stop the run."""
        if self.quiet or self._console_error:
            return
        try:
            print(text, file=self.stream, flush=True)
        except OSError as error:
            self._console_error = error.strerror or str(error)
            if self.stream is None:
                _drop_standard_output()

    def record(self, kind, step, **values):
        """A line of log.jsonl. Numbers are written in full: equal text is equal bits."""
        if self.quiet:
            return
        with writing(self.path):
            self._file.write(dumps({"kind": kind, "step": step, **values}) + "\n")
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
            try:
                if sink is not None:
                    sink.close()
            except OSError:
                pass  # what could not be flushed was said when it was written
        if self._wandb:
            self._wandb.finish()


def read_log(path):
    """The entries of a log.jsonl. Incomplete lines, which a killed process or a crash of the
    machine may leave, are ignored."""
    entries = []
    try:
        raw = read_bytes(path, _LONGEST)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error})") from None
    for line in raw.decode("utf-8", errors="replace").splitlines():
        try:
            entry = load_figures(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and "kind" in entry:
            entries.append(entry)
    return entries


def _drop_standard_output():
    """Detaches the console. Otherwise Python would try to flush it at exit, fail again, and return
    an exit code of its own."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # no file behind it


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
