#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a small record under results/train/ from the directories of finished runs.

    runs/record.py results/train/NAME.json RUN...
    runs/record.py results/train/NAME.json --bias bias.json
    runs/record.py results/sla2/NAME.json --sla2 sla2.json

Kept of a run: the fields of its configuration that are not the default, its summary, the median
MFU, the loss curve thinned to 100 points, all evaluations and audits. A run that is not finished is
recorded as of its last evaluation, and left out before its first.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

from sagebwd.pages.svg import smoothed, thinned
from sagebwd.train.config import Config
from sagebwd.train.json_text import dumps, load_figures
from sagebwd.train.log import read_log
from sagebwd.train.report.runs import Run, read_runs

ROOT = pathlib.Path(__file__).resolve().parent.parent


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def where():
    import torch

    info = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        info["gpu"], info["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        info["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return info


def rounded(value):
    """Six digits of every float: enough to read, small to keep."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def read_run(directory):
    """None if there is nothing to record yet."""
    if (directory / "summary.json").exists():
        return read_runs([directory])[0]
    if not (directory / "log.jsonl").exists():
        return None
    config = load_figures((directory / "config.json").read_text())
    run = Run(directory.name, config, {"unfinished": True}, read_log(directory / "log.jsonl"))
    for entry in run.of("eval")[-1:]:
        run.summary.update(steps=entry["step"], eval_loss=entry["loss"])
    return run if "steps" in run.summary else None


def of_run(run):
    default = json.loads(Config().to_json())
    mfu = [e["mfu"] for e in run.of("step")[2:] if e["mfu"] is not None]  # warm
    audits = [{k: v for k, v in e.items() if k != "kind"} for e in run.of("audit")]
    return {
        "name": run.name,
        "config": {k: v for k, v in run.config.items() if default.get(k) != v and k != "out"},
        "summary": run.summary,
        "train_loss": run.train_loss,
        "mfu": statistics.median(mfu) if mfu else None,
        "curve": thinned(smoothed(run.curve(), 0.02), 100),
        "evals": run.curve(kind="eval"),
        "audits": audits,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("runs", nargs="*", type=pathlib.Path)
    parser.add_argument("--bias", type=pathlib.Path)
    parser.add_argument("--sla2", type=pathlib.Path)
    args = parser.parse_args()
    given = os.environ.get("SAGEBWD_COMMIT")
    clean = None if given else git("status", "--porcelain", "--", ".", ":!results")
    record = {
        "command": os.environ.get("COMMAND", " ".join(sys.argv)),
        "commit": given or git("rev-parse", "HEAD"),
        "clean": None if clean is None else clean == "",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "machine": where(),
    }
    if args.bias:
        record["bias"] = json.loads(args.bias.read_text())
    elif args.sla2:
        record |= json.loads(args.sla2.read_text())
        for run in record["runs"]:
            run["losses"] = thinned(smoothed(list(enumerate(run["losses"]))), 40)
    else:
        record["runs"] = [of_run(run) for run in map(read_run, args.runs) if run]
    args.target.parent.mkdir(parents=True, exist_ok=True)
    text = dumps(rounded(record), indent=1)
    text = re.sub(r"\[\s+(\S+),\s+(\S+)\s+\]", r"[\1, \2]", text)  # points on one line
    args.target.write_text(text + "\n")
    print(f"{args.target}: {len(record.get('runs', [])) or 'bias'} recorded")


if __name__ == "__main__":
    main()
