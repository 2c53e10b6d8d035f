# SPDX-License-Identifier: Apache-2.0
"""The training loop: one process on a CPU, one GPU, or many ranks, all the same code.

A step reads its batch, accumulates gradients over micro-batches, and looks at the loss and the
gradient norm once, before the optimizer moves: what is not finite stops the run with the weights
still good. That look is the only time the host waits for the device.
"""

import json
import math
import os
import signal
import statistics
import time
from pathlib import Path

import torch

from . import checkpoint, flops, state
from .audit import Auditor
from .batch_plan import plan_batch
from .config import NUMERIC, check
from .data import Batches, evaluation_windows, open_data
from .distributed import World
from .errors import BadInput, NonFinite, NotSaved, Stopped
from .log import Log
from .machine import describe_machine
from .model import build
from .sample import sample
from .schedule import learning_rate, make_optimizer, set_learning_rate


class StopRequest:
    """Turns SIGTERM and SIGINT into a wish that the loop grants between two steps."""

    def __init__(self):
        self.wanted = None

    def __enter__(self):
        self._before = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:
                pass  # not the main thread: the caller's handlers stay
        return self

    def _note(self, number, frame):
        self.wanted = signal.Signals(number).name

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Trainer:
    """A run: model, data, optimizer and where it stands. ``source`` may be shared by several.
    ``began``: when the time limit started to count, if before the first step."""

    def __init__(self, config, source=None, label="", stream=None, began=None):
        check(config)
        self._began = began
        if config.threads:
            torch.set_num_threads(config.threads)
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        self.config = config
        self.world = World(config)
        self.device = self.world.device
        self.dtype = run_dtype(config, self.device)
        self.plan = plan_batch(config, self.world.readers, self.device)
        self.source = source or open_data(config)
        self.batches = Batches(self.source.train, config.context, config.data_seed, self.device)
        self._held_out = Batches(self.source.val, config.context, 0, self.device)
        self.model = build(config, self.source.vocab, self.device)
        if config.compile != "off":
            self.model.compile_blocks(config.compile)
        self.wrapped = self.world.wrap(self.model)
        self.optimizer = make_optimizer(config, self.model)
        self.auditor = Auditor(config, self.model) if config.audit_every else None
        self.log = Log(config, self.world, label, stream)
        self.step_count, self.seconds = 0, 0.0
        self.last = {}  # loss of the last step, last evaluation
        self.save_error = None
        self._speeds = []
        if not self._resume() and config.init:
            self._start_from_weights()
        self._clear_directory()
        self.log.open(self.step_count)
        if self.world.is_main:
            Path(config.out, "config.json").write_text(config.to_json())

    # --- where it stands --------------------------------------------------------------------------

    @property
    def done(self):
        return self.step_count >= self.config.steps

    def introduce(self):
        c, plan = self.config, self.plan
        count = sum(p.numel() for p in self.model.parameters())
        self.log.say(
            f"model    {count / 1e6:.1f}M parameters: {c.layers} layers, width {c.width}, "
            f"{c.heads} heads of {c.head_dim}, context {c.context}"
            f"{', QK-norm' if c.qk_norm else ''}\n"
            f"attends  {c.describe_attention()}\n"
            f"data     {self.source.words}\n"
            f"batch    {c.tokens_per_step} tokens a step: {plan.accumulate} x {plan.micro} "
            "sequences"
            f"{f' on each of {self.world.readers} readers' if self.world.readers > 1 else ''}\n"
            f"device   {describe_machine(self.device)}, {str(self.dtype)[6:]}; "
            f"{self._mfu_words()}\n"
            f"writes   {c.out}"
            + (f"; goes on after step {self.step_count}" if self.step_count else "")
            + (f"\nweights  of {c.init}" if c.init and not self.step_count else "")
        )

    def peak(self):
        return flops.peak(self.device, self.dtype)

    def _mfu_words(self):
        rate, why = self.peak()
        return f"MFU of the {why}" if rate else f"no MFU, {why}"

    def autocast(self):
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )

    # --- a step -----------------------------------------------------------------------------------

    def step(self, stop=None):
        """One optimizer step. ``stop``: a StopRequest; true is returned where any rank has one, or
        the time limit has passed."""
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
        self._speeds.append(speed)
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
        seen = torch.stack((total / plan.accumulate, total.new_tensor(wish)))
        loss, wish, norm = torch.cat((world.mean(seen), norm[None])).tolist()  # the host waits here
        return loss, norm, wish > 0

    @staticmethod
    def pair(rows):
        """Tokens and targets of sequences of context + 1 tokens."""
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _time_is_up(self):
        return 0 < self.config.time_limit < time.perf_counter() - self._run_began

    def stopped(self, stop):
        """What to raise after ``stop`` was granted."""
        rest = "continue with --resume auto" if self.config.keep else "nothing is kept"
        why = stop.wanted or "the time limit"
        return Stopped(f"stopped by {why} after step {self.step_count}; {rest}")

    def _stop_before_optimizer(self, loss, norm):
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
        at = self.step_count + 1
        self.log.record("non-finite", at, loss=str(loss), grad_norm=str(norm))
        path = self._write(name=f"nonfinite-step-{at:08d}")
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

    def activation_bytes(self):
        """What the forward of one sequence keeps for its backward, weights not counted. None where
        ranks share the weights or the sequence."""
        if self.world.size > 1:
            return None
        kept = {}

        def note(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        tokens, targets = self.pair(self.held_out_rows(1))
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
            self.autocast(),
        ):
            self.model(tokens, targets)
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        return sum(size for at, size in kept.items() if at not in weights)

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
        return Path(self.config.out) / "checkpoints"

    def save(self):
        """A failed save is said and remembered; training goes on and the older checkpoints stay."""
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
                "sequences_read": self.step_count * self.plan.sequences,
                "config": json.loads(self.config.to_json()),
            }
            try:
                path = checkpoint.save(
                    self.checkpoints, self.step_count, tensors, more, self.config.keep, name
                )
                self.save_error = None
            except OSError as error:
                self.save_error = f"{self.checkpoints}: {error.strerror or error}"
                self.log.say(f"could not save after step {self.step_count}: {self.save_error}")
        self.world.barrier()
        return path

    def _resume(self):
        """Goes on from a checkpoint where the configuration asks for it; returns whether it did."""
        wanted = self.config.resume
        if not wanted:
            return False
        if wanted == "auto":
            found = checkpoint.load_newest(self.checkpoints, self.log.say)
        else:
            path = checkpoint.find(wanted)
            found = (path, *checkpoint.load(path))
        if found is None:
            return False
        path, saved, tensors = found
        differ = [n for n in NUMERIC if saved["config"].get(n) != getattr(self.config, n)]
        if differ:
            words = ", ".join(
                f"{n} {saved['config'].get(n)!r}, now {getattr(self.config, n)!r}" for n in differ
            )
            raise BadInput(f"resume: {path} was made by another configuration: {words}")
        if saved["data"] != self.source.fingerprint:
            raise BadInput(f"resume: {path} was trained on other data")
        try:
            state.restore(self.model, self.optimizer, tensors)
        except (ValueError, KeyError) as error:
            raise BadInput(f"resume: {path} does not fit the model ({error})") from None
        self.step_count, self.seconds = saved["step"], saved["seconds"]
        return True

    def _start_from_weights(self):
        path = checkpoint.find(self.config.init)
        try:
            state.restore_weights(self.model, checkpoint.load(path)[1]["weights"])
        except (ValueError, KeyError) as error:
            raise BadInput(f"init: {path} does not fit the model ({error})") from None

    def _clear_directory(self):
        """What a former run has left beyond the step this one begins at would be taken for its
        own."""
        if not self.world.is_main:
            return
        found = checkpoint.list_checkpoints(self.checkpoints)
        later = [p for p in found if checkpoint.step_of(p) > self.step_count]
        if later and not self.config.overwrite and self.config.resume != "auto":
            raise BadInput(
                f"out: {self.config.out} holds a run up to step {checkpoint.step_of(later[-1])}; "
                "go on with --resume auto, start anew with --overwrite, or name another directory"
            )
        for path in later:
            checkpoint.remove(path)
        if not self.done:
            self._summary_path.unlink(missing_ok=True)

    # --- the whole run ----------------------------------------------------------------------------

    def after_step(self):
        """What is due between two steps."""
        c, at = self.config, self.step_count
        if c.eval_every and at % c.eval_every == 0 and not self.done:
            self.evaluate()
        if self.auditor and at % c.audit_every == 0:
            self.audit()
        if c.save_every and at % c.save_every == 0 and not self.done:
            self.save()

    def start_clock(self):
        self._run_began = self._began or time.perf_counter()

    def run(self):
        """Trains to the last step. Raises Stopped, NonFinite or NotSaved; returns the summary."""
        self.introduce()
        if self.is_finished:
            self.log.say("this run is finished; nothing was done")
            return json.loads(self._summary_path.read_text())
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
        summary = self.summary()
        if self.world.is_main:
            text = json.dumps(summary, indent=1) + "\n"
            self._summary_path.write_text(text)
        if self.save_error:
            raise NotSaved(f"the last checkpoint could not be written: {self.save_error}")
        return summary

    @property
    def is_finished(self):
        """At the last step, evaluated and saved."""
        return self.done and self._summary_path.exists()

    @property
    def _summary_path(self):
        return Path(self.config.out) / "summary.json"

    def summary(self):
        # The first steps compile, allocate and warm caches up.
        speeds = self._speeds[2:] or self._speeds or [0.0]
        on_gpu = self.device.type == "cuda"
        return {
            "attention": self.config.describe_attention(),
            "steps": self.step_count,
            "tokens": self.step_count * self.config.tokens_per_step,
            "loss": self.last.get("loss"),
            "eval_loss": self.last.get("eval_loss"),
            "seconds": self.seconds,
            "tokens_per_second": statistics.median(speeds),
            "peak_memory": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
            "activation_bytes": self.activation_bytes(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "data": self.source.fingerprint,
            "machine": describe_machine(self.device),
            "torch": torch.__version__,
        }

    def close(self):
        torch.use_deterministic_algorithms(self._was_deterministic)
        self.log.close()
        self.world.close()


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
