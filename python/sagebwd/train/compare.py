# SPDX-License-Identifier: Apache-2.0
"""Trains several configurations on the same data and puts them into one report. They take turns
step by step, so that a busy machine slows all of them alike."""

import os
import re
from pathlib import Path

import torch

from ..recipe import MATMULS, SCHEMES, SWITCHES
from ..suggest import did_you_mean
from ..tools.diagnosis import diagnose
from .config import FIELDS, check, from_dict
from .data import open_data
from .errors import BadInput, NonFinite, figures_of, writing
from .files import read_text, write_text
from .json_text import dumps, load_figures
from .loop import Trainer
from .report import read_runs, write_report
from .report.verdict import plain_verdict
from .stop import StopRequest

#: Attentions of an arm. Words after one are switches of the recipe, or fields of the arm's own:
#: ``NAME=paper rounding=dither lr=1e-3``.
BASES = {
    "fpa": dict(attention="fpa"),
    "exact": dict(attention="exact"),
    **{scheme: dict(attention="sagebwd", recipe=scheme) for scheme in SCHEMES},
}
#: Arms share these: one data set, one process, one directory above theirs.
_SHARED = ("out", "data", "val", "tokenizer", "as_bytes", "vocab", "threads", "deterministic")
_NAME = re.compile(r"\w[\w.+' -]{0,99}")  # of an arm, and of its directory
_DIAGNOSED = 1024  # tokens: float64 attention holds [heads, n, n]


def parse_arms(text, config):
    """{name: Config} from ``fpa,paper,dither=paper rounding=dither``."""
    arms = {}
    for part in split(text):
        base, *words = part.split()
        name, separator, base = base.rpartition("=")
        if base not in BASES:
            old = ":" in part.split()[0]
            hint = "; changes are words: 'paper rounding=dither'" if old else ""
            raise BadInput(
                f"compare: expected an arm of {', '.join(BASES)}, got {base!r}"
                f"{did_you_mean(base, BASES) or hint}"
            )
        name = name if separator else base
        if not _NAME.fullmatch(name) or ".." in name:
            raise BadInput(
                f"compare: an arm's name is the name of its directory; expected letters, digits "
                f"and _ . + - ', got {name!r}"
            )
        if name in arms:
            raise BadInput(f"compare: two arms are named {name!r}")
        values = {**BASES[base], **_fields(part, words), "out": os.path.join(config.out, name)}
        switches = [word for word in words if word.partition("=")[0] in SWITCHES]
        if switches and "recipe" not in values:
            raise BadInput(f"compare: {base} has no recipe that {switches[0]!r} could change")
        if switches:
            values["recipe"] = " ".join([values["recipe"], *switches])
        arms[name] = from_dict(values, config)
        check(arms[name])
    if not arms:
        raise BadInput("compare: no arms were given")
    return arms


def split(text):
    """The arms, or recipes, of a list. Commas separate them, but for commas before the name of a
    matmul: ``vectorwise lift=dQ,dK,paper``."""
    parts = []
    for part in filter(str.strip, text.split(",")):
        if parts and part.split()[0] in (*MATMULS, "S2"):
            parts[-1] += "," + part
        else:
            parts.append(part.strip())
    return parts


def _fields(part, words):
    """Fields of the configuration among the words of an arm."""
    values = {}
    for word in words:
        field, separator, value = word.partition("=")
        if not separator:
            raise BadInput(f"compare: expected field=value in {part!r}, got {word!r}")
        if field in SWITCHES:
            continue
        if field in _SHARED:
            raise BadInput(f"compare: {field} is the same for all arms, not for {part!r}")
        if field not in FIELDS:
            raise BadInput(
                f"compare: {part!r}: no switch of a recipe and no field is named {field!r}"
                f"{did_you_mean(field, (*SWITCHES, *FIELDS))}"
            )
        values[field] = value
    return values


def compare(config, arms, arguments=(), began=None):
    """Trains all arms and writes ``report.html`` to ``config.out``. An arm that becomes non-finite
    ends; the others go on. ``began``: see Trainer. Returns the runs."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BadInput("compare: runs in one process; train the arms one by one with torchrun")
    arms = parse_arms(arms, config)
    source = open_data(next(iter(arms.values())))
    width = max(map(len, arms))
    trainers, failed = {}, {}
    try:
        for name, arm in arms.items():
            trainers[name] = Trainer(arm, source, label=f"{name:{width}} ", began=began)
        _introduce(trainers)
        _in_step(trainers, failed)
        if not trainers:
            raise NonFinite("; ".join(f"{name}: {why}" for name, why in failed.items()))
        for trainer in trainers.values():
            if not trainer.is_finished:
                trainer.finish()
        layers = diagnose_layers(trainers)
    finally:
        for trainer in trainers.values():
            trainer.close()
    out = Path(config.out)
    with writing(out / "layers.json"):
        write_text(out / "layers.json", dumps(layers, indent=1) + "\n")
    command = " ".join(["python -m sagebwd.train", *map(str, arguments)])
    runs, page = make_report([Path(t.config.out) for t in trainers.values()], out, command)
    print(f"\n{plain_verdict(runs)}\n")
    for name, why in failed.items():
        print(f"{name} did not finish: {why}")
    print(f"The report is {page}; its figures are in {page.with_suffix('.json')}.")
    return runs


def _introduce(trainers):
    first = next(iter(trainers.values()))
    first.introduce()
    first.log.say(f"arms     {', '.join(trainers)}, in step\n")
    for trainer in trainers.values():
        trainer.start_clock()


def _in_step(trainers, failed):
    """The arm that is furthest behind takes the next step, until all are done."""
    with StopRequest() as stop:
        while waiting := {n: t for n, t in trainers.items() if not t.done}:
            name = min(waiting, key=lambda n: waiting[n].step_count)
            trainer = waiting[name]
            try:
                wanted = trainer.step(stop)
            except NonFinite as error:
                failed[name] = str(error)
                trainer.log.say(f"{name}: {error}")
                trainers.pop(name).close()
                continue
            trainer.after_step()
            if wanted:
                for other in trainers.values():
                    other.save()
                raise next((t for t in trainers.values() if t.save_error), trainer).stopped(stop)


def diagnose_layers(trainers):
    """Errors of every layer of the full-precision model, for each recipe among the arms."""
    names = [n for n, t in trainers.items() if t.config.attention == "sagebwd"]
    if not names:
        return {}
    fpa = [t for t in trainers.values() if t.config.attention == "fpa"]
    trainer = (fpa or list(trainers.values()))[0]
    rows = trainer.held_out_rows(1)[:, : _DIAGNOSED + 1]
    layers = {}
    for name in names:
        recipe = trainers[name].config.make_recipe()
        with torch.compiler.set_stance("force_eager"), trainer.autocast():
            report = diagnose(
                trainer.model, trainer.pair(rows), loss=lambda y: y, recipe=recipe, file=None
            )
        layers[name] = [
            {"layer": r.index, "errors": r.errors, "max_logit": r.max_logit, "verdict": r.verdict}
            for r in report.layers
        ]
    return layers


def make_report(directories, out, command, beside=None):
    """(runs, path) of a report on finished runs. ``beside``: where instruments have left what they
    found, if not in ``out``."""
    runs = read_runs(directories)
    parts = {}
    for name in ("layers", "accuracy", "bias"):
        file = (beside or out) / f"{name}.json"
        try:
            parts[name] = load_figures(read_text(file)) if file.exists() else None
        except (OSError, ValueError) as error:
            raise BadInput(f"{file}: cannot be read ({error})") from None
    page = out / "report.html"
    names = ", ".join(map(str, directories))
    with writing(page), figures_of(names):
        write_report(runs, page, command=command, **parts)
    return runs, page


def report_runs(directories, out=None):
    """A report of runs that are done, in ``out`` or in the directory above the first."""
    words = " ".join(map(str, directories)) + (f" --out {out}" if out else "")
    beside = directories[0].resolve().parent
    out = out or beside
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    command = f"python -m sagebwd.train --report {words}"
    runs, page = make_report(directories, out, command, beside)
    print(f"{plain_verdict(runs)}\n")
    return page
