# SPDX-License-Identifier: Apache-2.0
"""Writes docs/api/cli.md from what the commands say to --help. With --check it only compares."""

import argparse
import difflib
import os
import pathlib
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "api" / "cli.md"
HEAD = """<!-- SPDX-License-Identifier: Apache-2.0 -->
# Command line

`tools/docs/cli.py` writes this page from what each command says to `--help`.

`sagebwd` is on the PATH after `pip install .`. A *case string* names one problem:
`h32 hk8 n8192 d128 causal bf16` is 32 query heads, 8 key heads, 8192 tokens, head dim 128, a causal
mask and bfloat16.
"""
COMMANDS = (
    ("sagebwd", "run", "Any script with INT8 attention, without editing it"),
    ("sagebwd", "doctor", "What INT8 attention would do to a checkpoint"),
    ("sagebwd", "info", "What this machine can run, and why"),
    ("sagebwd", "recipe", "The switches of recipes"),
    ("sagebwd", "trace", "Errors of every tensor"),
    ("sagebwd", "report", "Accuracy and speed as a page"),
    ("sagebwd", "bench", "Time of the library's calls"),
    ("python", "sagebwd", "What the Python package has"),
    ("python", "sagebwd.bench", "Time against other attentions, on a GPU"),
    ("python", "sagebwd.train", "The trainer"),
    ("python", "sagebwd.train.sample", "Text from a trained model"),
    ("python", "sagebwd.train.export", "A trained model for transformers"),
    ("python", "sagebwd.train.bias", "Does the gradient error average out?"),
    ("python", "sagebwd.train.layers", "Errors of each layer of a run"),
    ("python", "sagebwd.evidence", "Errors inside a real model"),
    ("python", "sagebwd.sla2.demo", "SLA2 on clips made on the fly"),
)


def arguments(kind, name):
    """The command line of a command's help."""
    if kind == "sagebwd":
        return [os.path.join(os.path.dirname(sys.executable), "sagebwd"), name, "--help"]
    return [sys.executable, "-m", name, "--help"]


def help_text(kind, name):
    done = subprocess.run(
        arguments(kind, name),
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", "PYTHON_COLORS": "0"},
    )
    if done.returncode != 0:
        sys.exit(f"{kind} {name} --help: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def page():
    parts = [HEAD]
    for kind, name, title in COMMANDS:
        command = f"sagebwd {name}" if kind == "sagebwd" else f"python -m {name}"
        parts.append(f"## {command}\n\n{title}.\n\n```text\n{help_text(kind, name)}\n```\n")
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return
    # Python's versions break the lines of a help text differently.
    was, now = PAGE.read_text().split(), page().split()
    if was != now:
        lines = difflib.unified_diff(was, now, "docs/api/cli.md", "--help", lineterm="", n=3)
        sys.exit("\n".join(lines) + "\nrun tools/docs/cli.py")


if __name__ == "__main__":
    main()
