# SPDX-License-Identifier: Apache-2.0
"""sagebwd run: a command whose processes compute attention in INT8."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

if __package__:
    from . import summary
else:  # started by its path: importing the package would import PyTorch
    sys.path[0] = os.path.dirname(os.path.abspath(__file__))
    import summary

HOOKS = ("sdpa", "transformers", "diffusers", "flash_attn", "sageattention")
HERE = os.path.dirname(os.path.abspath(__file__))


def parsed(argv):
    parser = argparse.ArgumentParser(
        prog="sagebwd run",
        usage="sagebwd run [--as NAME,...] [--recipe TEXT] [--strict] -- COMMAND ...",
        description="Runs a command and all processes below it with INT8 attention, without "
        "editing a file. Nothing outside of them changes. A summary on stderr closes the run: what "
        "ran in INT8, what did not, and why.",
        epilog="Examples: sagebwd run -- python train.py; sagebwd run -- torchrun "
        "--nproc-per-node 8 train.py; sagebwd run --as transformers -- accelerate launch train.py",
    )
    parser.add_argument(
        "--as",
        dest="hooks",
        metavar="NAME,...",
        help=f"which attention to replace, of {', '.join(HOOKS)}; default: all of them, but a "
        "flash_attn or sageattention that is installed only if it is named here",
    )
    parser.add_argument(
        "--recipe",
        metavar="TEXT",
        default="vectorwise",
        help="the recipe of all attention that is replaced, such as paper; default: vectorwise",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="raise where a call cannot run in INT8, instead of running the original attention; "
        "and fail with status 3 if no call ran in INT8",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    args = parser.parse_args(argv)
    if args.command[:1] == ["--"]:
        del args.command[0]
    if not args.command:
        parser.error("expected a command after --, such as: sagebwd run -- python train.py")
    args.named = [name for name in (args.hooks or "").split(",") if name]
    for name in args.named:
        if name not in HOOKS:
            parser.error(f"--as: expected names of {', '.join(HOOKS)}, got {name!r}")
    if args.hooks is not None and not args.named:
        parser.error(f"--as: expected names of {', '.join(HOOKS)}")
    if args.recipe != "vectorwise" and (wrong := wrong_recipe(args.recipe)):
        parser.error(f"--recipe: {wrong}")
    flag = deaf(args.command)
    if flag:
        parser.error(
            f"{args.command[0]} {flag} reads no PYTHONPATH or no sitecustomize, so nothing "
            "would run in INT8: leave the option out"
        )
    return args


def wrong_recipe(text):
    """What is wrong with it, or None. Where sagebwd is not installed, its processes say that."""
    try:
        from sagebwd import Recipe
    except ImportError:
        return None
    try:
        Recipe.parse(text)
    except ValueError as error:
        return str(error).removeprefix("recipe: ")
    return None


def deaf(command):
    """An option by which Python would not notice us, or None."""
    if not re.fullmatch(r"python[\d.]*", os.path.basename(command[0])):
        return None
    for word in command[1:]:
        if not word.startswith("-") or word in ("-m", "-c") or word.startswith("--"):
            return None
        if re.match(r"-[a-zA-Z]*[EIS]", word):
            return word
        if word in ("-W", "-X"):
            return None
    return None


def environment(args, records):
    env = dict(os.environ)
    path = [os.path.join(HERE, "start")]
    if env.get("PYTHONPATH"):
        path.append(env["PYTHONPATH"])
    env["PYTHONPATH"] = os.pathsep.join(path)
    settings = {"as": args.named or HOOKS, "named": args.named, "recipe": args.recipe}
    settings |= {"strict": args.strict, "records": records}
    env["SAGEBWD_RUN"] = json.dumps(settings)
    return env


def main(argv=None):
    args = parsed(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory(prefix="sagebwd-run-") as records:
        try:
            process = subprocess.Popen(args.command, env=environment(args, records))
        except OSError as error:
            sys.exit(f"sagebwd run: {args.command[0]}: {error.strerror}")
        # Ctrl-C reaches the command by itself; what ends us otherwise is passed on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: process.send_signal(number))
        status = process.wait()
        found = summary.read(records)
    for line in summary.lines(found):
        print(line, file=sys.stderr)
    ran = any(c["calls"] for record in found for c in record["hooks"].values())
    if args.strict and status == 0 and not ran:
        return 3
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
