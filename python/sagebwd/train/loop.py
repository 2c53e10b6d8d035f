# SPDX-License-Identifier: Apache-2.0
"""The training loop: one process on a CPU, one GPU, or many ranks, all the same code.

A step reads its batch, accumulates gradients over micro-batches, and reads the loss and the
gradient norm once, before the optimizer changes a weight. If one of them is not finite, the run
stops with the weights still good. This is the only time the host waits for the device.
"""

import math
import os
import time

import torch

from . import checkpoint, flops, state
from .audit import Auditor
from .batch_plan import plan_batch
from .config import check
from .data import Batches, evaluation_windows, open_data
from .describe import introduction, summary
from .distributed import World
from .errors import BadInput, NonFinite, NotSaved, Stopped, figures_of
from .generate import encode_prompt, sample
from .json_text import loads
from .log import Log
from .model import build
from .resume import check_fits, open_checkpoint
from .run_directory import RunDirectory
from .schedule import describe_change, learning_rate, make_optimizer, set_learning_rate
from .stop import StopRequest


class Trainer:
    """A run: model, data, optimizer and progress. Several runs may share a ``source``. ``began``:
    when the time limit started to count, if before the first step."""

    def __init__(self, config, source=None, label="", stream=None, began=None):
        check(config)
        self.config, self._began = config, began
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()
        self.directory = RunDirectory(config.out)
        self.world = self.log = None
        self.step_count, self.seconds = 0, 0.0
        self.last = {}  # loss of the last step, last evaluation
        self.save_error = None
        self.speeds = []  # tokens per second of every step
        self._save_due, self._saved_at = False, time.perf_counter()
        try:
            self._set_up(source, label, stream)
        except BaseException:
            self.close()  # another trainer of this process may want the directory
            raise

    def _set_up(self, source, label, stream):
        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        self.world = World(config)
        self.device = self.world.device
        self.dtype = run_dtype(config, self.device)
        self.plan = plan_batch(config, self.world.readers, self.device)
        self.source = source or open_data(config)
        if config.sample_tokens:
            encode_prompt(self.source.tokenizer, config.prompt, self.source.vocab)
        self.batches = Batches(self.source.train, config.context, config.data_seed, self.device)
        self._held_out = Batches(self.source.val, config.context, 0, self.device)
        if self.world.is_main:
            self.directory.claim()
        self.log = Log(config, self.world, label, stream)
        self.model = build(config, self.source.vocab, self.device)
        if config.compile != "off":
            self.model.compile_blocks(config.compile)
        self.wrapped = self.world.wrap(self.model)
        self.optimizer = make_optimizer(config, self.model)
        self.auditor = Auditor(config, self.model) if config.audit_every else None
        self._begin()

    def _begin(self):
        """Starts from a checkpoint, from given weights or from random ones, and clears the
        directory of later steps."""
        config, steps_before = self.config, None
        found = open_checkpoint(config, self.checkpoints, self.log.say)
        if found is not None:
            steps_before = self._resume(*found)
        elif config.init:
            self._start_from_weights()
        self.world.check_same(self.step_count)
        aside = []
        if self.world.is_main:
            going_on = config.resume == "auto" and found is not None
            aside = self.directory.clear_after(self.step_count, config.overwrite, going_on)
            if not self.done:
                self.directory.remove_summary()
        self._remember(self.log.open(self.step_count))
        if self.world.is_main:
            self.directory.write_config(config)
        for path in aside:
            self.log.record("aside", self.step_count, path=path.name)
            self.log.say(f"{self.log.label}kept as {path}: a checkpoint that could not be read")
        if steps_before not in (None, config.steps):
            self.log.record(
                "schedule", self.step_count, steps=config.steps, steps_before=steps_before
            )
            words = describe_change(config, self.step_count, steps_before)
            self.log.say(f"{self.log.label}NOTE: {words}")

    def _remember(self, entries):
        """What the summary says of steps before an interruption."""
        with figures_of(self.log.path):
            steps = [e for e in entries if e["kind"] == "step"]
            self.speeds = [float(e["tokens_per_second"]) for e in steps]
            if steps:
                self.last["loss"] = float(steps[-1]["loss"])

    # --- where it stands --------------------------------------------------------------------------

    @property
    def done(self):
        return self.step_count >= self.config.steps

    def introduce(self):
        self.log.say(introduction(self))

    def peak(self):
        return flops.peak(self.device, self.dtype)

    def autocast(self):
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )

    # --- a step -----------------------------------------------------------------------------------

    def step(self, stop=None):
        """One optimizer step. ``stop``: a StopRequest. Returns true if any rank has one or the time
        limit has passed. It also decides, for all ranks, whether a checkpoint is due."""
        began = time.perf_counter()
        config, step = self.config, self.step_count
        self.model.train()
        rate = learning_rate(config, step)
        set_learning_rate(self.optimizer, rate)
        loss, norm, wanted = self._accumulate(step, stop)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._stop_before_optimizer(loss, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        elapsed = time.perf_counter() - began
        self.seconds += elapsed
        self.step_count += 1
        speed = config.tokens_per_step / elapsed
        self.speeds.append(speed)
        padded = self.model.embedding.num_embeddings
        peak = self.peak()[0]
        used = speed * flops.per_token(config, padded) / (peak * self.world.size) if peak else None
        self.last["loss"] = loss
        self.log.step(
            self.step_count, loss, norm, rate, 1e3 * elapsed, speed, used, seconds=self.seconds
        )
        return wanted

    def _accumulate(self, step, stop):
        """Gradients of a step, clipped; (loss, gradient norm, whether to stop) as numbers."""
        plan, world, model = self.plan, self.world, self.model
        first = step * plan.sequences + world.reader * plan.local
        rows = self.batches.rows(first, plan.local)
        total = torch.zeros((), device=self.device)
        for micro in range(plan.accumulate):
            model.clock.step = step
            model.clock.micro = world.reader * plan.accumulate + micro
            tokens, targets = self.pair(rows[micro * plan.micro : (micro + 1) * plan.micro])
            with (
                world.accumulating(self.wrapped, micro == plan.accumulate - 1),
                world.sharing(model, tokens, targets),
            ):
                with self.autocast():
                    loss = self.wrapped(tokens, targets)
                (loss / plan.accumulate).backward()
            total += loss.detach()
        limit = self.config.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        wish = float(stop is not None and (stop.wanted is not None or self._time_is_up()))
        due = float(world.is_main and self._save_is_due())
        seen = torch.cat(((total / plan.accumulate)[None], total.new_tensor([wish, due])))
        # The host waits here.
        loss, wish, due, norm = torch.cat((world.mean(seen), norm[None])).tolist()
        self._save_due = due > 0
        return loss, norm, wish > 0

    @staticmethod
    def pair(rows):
        """Tokens and targets of sequences of context + 1 tokens."""
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _time_is_up(self):
        return 0 < self.config.time_limit < time.perf_counter() - self._run_began

    def _save_is_due(self):
        waited = time.perf_counter() - self._saved_at
        return 0 < 60 * self.config.save_minutes <= waited

    def stopped(self, stop):
        """What to raise after ``stop`` was granted and the state was to be saved."""
        if self.save_error:
            return self._not_saved()
        rest = "continue with --resume auto" if self.config.keep else "nothing is kept"
        why = stop.wanted or "the time limit"
        return Stopped(f"stopped by {why} after step {self.step_count}; {rest}")

    def _stop_before_optimizer(self, loss, norm):
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
        at = self.step_count + 1
        self.log.record("non-finite", at, loss=str(loss), grad_norm=str(norm))
        path = self._write(name=f"nonfinite-step-{at:08d}")
        if self.save_error:
            raise NonFinite(f"step {at}: {what}; the weights could not be saved, {self.save_error}")
        raise NonFinite(
            f"step {at}: {what}; the weights before this step are in {path}. The same batch comes "
            "again with --resume on that path."
        )

    # --- evaluation, sample, audit ----------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self):
        """Mean loss of the held-out sequences."""
        world, plan = self.world, self.plan
        self.model.eval()
        windows = evaluation_windows(
            self._held_out, self.config.eval_tokens, world.readers * plan.micro
        )
        mine = windows[world.reader :: world.readers]
        total, parts = torch.zeros((), device=self.device), 0
        for at in range(0, len(mine), plan.micro):
            tokens, targets = self.pair(self._held_out.windows(mine[at : at + plan.micro]))
            with world.sharing(self.model, tokens, targets), self.autocast():
                total += self.wrapped(tokens, targets)
            parts += 1
        world.settle(self.model)
        loss = world.mean(total / max(parts, 1)).item()
        self.last["eval_loss"] = loss
        self.log.record("eval", self.step_count, loss=loss, seconds=self.seconds)
        self.log.say(f"{self.log.label}eval after step {self.step_count}: loss {loss:.4f}")
        return loss

    def held_out_rows(self, count):
        """Held-out sequences, always the same: [count, context + 1]."""
        return self._held_out.windows(evaluation_windows(self._held_out, 1, count)[:count])

    def audit(self):
        """Errors of one layer's attention on a held-out sequence; alarms are printed."""
        tokens, targets = self.pair(self.held_out_rows(1))
        with self.autocast():
            result = self.auditor.run(self.step_count, tokens, targets)
        self.world.settle(self.model)
        self.log.record("audit", self.step_count, **result.to_dict())
        if result.alarms:
            words = f"layer {result.layer}: {'; '.join(result.alarms)}"
            self.log.say(f"{self.log.label}AUDIT after step {self.step_count}: {words}")
        return result

    def sample(self):
        c = self.config
        text = sample(self.model, self.source.tokenizer, c.prompt, c.sample_tokens, self.autocast)
        self.world.settle(self.model)
        self.log.record("sample", self.step_count, text=text)
        self.log.say(f"{self.log.label}sample text:\n{text}")
        return text

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def checkpoints(self):
        return self.directory.checkpoints

    def save(self):
        """Saves a checkpoint. A failure is printed and remembered; training continues, and the
        older checkpoints stay."""
        if self.config.keep == 0:
            return None
        path = self._write()
        if path is not None:
            self.log.record("save", self.step_count, path=path.name)
        return path

    def _write(self, name=None):
        tensors = state.collect(self.model, self.optimizer)
        path = None
        if self.world.is_main:
            more = {
                "seconds": self.seconds,
                "data": self.source.fingerprint,
                "vocab": self.source.vocab,
                "tokenizer": self.source.tokenizer.name if self.source.tokenizer else "unknown",
                "sequences_read": self.step_count * self.plan.sequences,
                "config": loads(self.config.to_json()),
            }
            try:
                path = checkpoint.save(
                    self.checkpoints, self.step_count, tensors, more, self.config.keep, name
                )
                self.save_error = None
            except OSError as error:
                self.save_error = f"{self.checkpoints}: {error.strerror or error}"
                self.log.say(f"could not save after step {self.step_count}: {self.save_error}")
        self._saved_at = time.perf_counter()
        self.world.barrier()
        return path

    def _not_saved(self):
        return NotSaved(f"the last checkpoint could not be written: {self.save_error}")

    def _resume(self, path, saved, tensors):
        """Goes on from a checkpoint. Returns for how many steps it was planned."""
        check_fits(self.config, path, saved, self.source.fingerprint)
        try:
            state.restore(self.model, self.optimizer, tensors)
        except (ValueError, KeyError, RuntimeError) as error:
            raise BadInput(f"resume: {path} does not fit the model ({error})") from None
        self.step_count, self.seconds = saved["step"], saved["seconds"]
        return saved["config"]["steps"]

    def _start_from_weights(self):
        path = checkpoint.find(self.config.init)
        try:
            state.restore_weights(self.model, checkpoint.load(path)[1]["weights"])
        except (ValueError, KeyError) as error:
            raise BadInput(f"init: {path} does not fit the model ({error})") from None

    # --- the whole run ----------------------------------------------------------------------------

    def after_step(self):
        """What is due between two steps."""
        c, at = self.config, self.step_count
        if c.eval_every and at % c.eval_every == 0 and not self.done:
            self.evaluate()
        if self.auditor and at % c.audit_every == 0:
            self.audit()
        due = self._save_due or (c.save_every and at % c.save_every == 0)
        if due and not self.done:
            self.save()

    def start_clock(self):
        self._saved_at = time.perf_counter()
        self._run_began = self._began or self._saved_at

    def run(self):
        """Trains to the last step. Raises Stopped, NonFinite or NotSaved; returns the summary."""
        self.introduce()
        if self.is_finished:
            self.log.say("this run is finished; nothing was done (--steps extends it)")
            return self.directory.read_summary(self.step_count)
        self.start_clock()
        with StopRequest() as stop:
            while not self.done:
                wanted = self.step(stop)
                self.after_step()
                if wanted and not self.done:
                    self.save()
                    raise self.stopped(stop)
            return self.finish()

    def finish(self):
        self.evaluate()
        self.save()
        if self.config.sample_tokens:
            self.sample()
        result = summary(self)
        if self.world.is_main:
            self.directory.write_summary(result)
        if self.save_error:
            raise self._not_saved()
        return result

    @property
    def is_finished(self):
        """At the last step, evaluated and saved."""
        return self.done and self.directory.read_summary(self.step_count) is not None

    def close(self):
        torch.use_deterministic_algorithms(self._was_deterministic)
        for part in (self.log, self.world):
            if part is not None:
                part.close()
        self.directory.release()


def run_dtype(config, device):
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]


def train(config, **options):
    """A whole run; returns its summary."""
    trainer = Trainer(config, **options)
    try:
        return trainer.run()
    finally:
        trainer.close()
