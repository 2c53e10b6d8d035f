#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what follows from the declaration of a recipe's fields (src/spec/recipe_fields.h): the
Python class of the fields, and the table of switches in docs/numerics.md. With --check it only
compares.

    tools/declare.py [--check] [PROGRAM]      PROGRAM: build/bin/sagebwd
"""

import json
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = ROOT / "python/sagebwd/recipe_fields.py"
DOCS = ROOT / "docs/numerics.md"
BEGIN, END = "<!-- recipe fields -->\n", "<!-- end -->"

_TYPES = {"scheme": "str", "flag": "bool", "integer": "int", "rounding": "str", "matmuls": "tuple"}


def fields_of_python(declared):
    """Python names the dithered matmuls in ``rounding``."""
    return [f for f in declared["fields"] if f["name"] != "dithered"]


def usual(field):
    return field["presets"]["vectorwise"]


def schemes_of(declared):
    """The default first, the published one last."""
    names = declared["fields"][0]["presets"]
    return sorted(names, key=["vectorwise", "paper"].index)


def python_fields(fields, scheme):
    """What a preset has other than ``vectorwise``, as a dict in Python."""
    other = {f["name"]: f["presets"][scheme] for f in fields if f["presets"][scheme] != usual(f)}
    return (
        "{" + ", ".join(f'"{name}": {python_value(value)}' for name, value in other.items()) + "}"
    )


def python_value(value):
    return repr(tuple(value) if isinstance(value, list) else value).replace("'", '"')


def python_words(text):
    return text.replace("`", "``")


def sentence(text):
    return text[0].upper() + text[1:] + "." if not text.startswith("`") else text + "."


def python_file(declared):
    fields = fields_of_python(declared)
    out = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Written by tools/declare.py from src/spec/recipe_fields.h.",
        '"""The fields of recipes: names, defaults, limits, and what they mean."""',
        "",
        "from dataclasses import dataclass",
        "",
        "#: The seven matmuls and their bits, in the order they run.",
        f"MATMULS = {json.dumps({name: 1 << i for i, name in enumerate(declared['matmuls'])})}",
    ]
    (dithered,) = (f for f in declared["fields"] if f["name"] == "dithered")
    schemes = schemes_of(declared)
    alone = tuple(f["name"] for f in fields if f["written"] == "alone")
    flags = tuple(f["name"] for f in fields if f["kind"] == "flag")
    out += [
        "#: The matmuls that dither can apply to.",
        f"DITHERABLE = {python_value(usual(dithered))}",
        "#: Integers: the largest value, what it is a multiple of, and both in words.",
        "INTEGERS = {",
        *(
            f"    {python_value(f['name'])}: ({f['most']}, {f['step']}, "
            f"{python_value(f['expected'])}),"
            for f in fields
            if f["kind"] == "integer"
        ),
        "}",
        f"FLAGS = {python_value(flags)}",
        "#: Switches that stand in a recipe's text under their own names.",
        f"ALONE = {python_value(alone)}",
        "#: By scheme, the default first: what its preset has other than ``vectorwise``.",
        "PRESETS = {",
        *(f'    "{scheme}": {python_fields(fields, scheme)},' for scheme in schemes),
        "}",
        "",
        "",
        "@dataclass(frozen=True)",
        "class RecipeFields:",
        '    """What a recipe is made of.',
        "",
    ]
    for f in fields:
        out.append(f"    {f['name']}")
        out += textwrap.wrap(
            sentence(python_words(f["help"])), 98, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    out += ['    """', ""]
    out += [f"    {f['name']}: {_TYPES[f['kind']]} = {python_value(usual(f))}" for f in fields]
    return "\n".join(out) + "\n"


def shown(value):
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return {True: "on", False: "off"}.get(value, f"{value}") if isinstance(value, bool) else value


def table(declared):
    out = ["| field of `Recipe` | default | meaning |", "|---|---|---|"]
    for f in fields_of_python(declared):
        default = f"{shown(usual(f))}"
        others = {s: f["presets"][s] for s in schemes_of(declared) if f["kind"] != "scheme"}
        others = [f"`{s}`: {shown(value)}" for s, value in others.items() if value != usual(f)]
        if others:
            default += f" ({', '.join(others)})"
        out.append(f"| `{f['name']}` | {default} | {f['help']} |")
    return "\n".join(out) + "\n"


def documented(text, declared):
    before, rest = text.split(BEGIN)
    _, after = rest.split(END, 1)
    return before + BEGIN + table(declared) + END + after


def main(arguments):
    check = "--check" in arguments
    programs = [a for a in arguments if a != "--check"] or [str(ROOT / "build/bin/sagebwd")]
    command = [programs[0], "recipe", "--declare"]
    declared = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    wanted = {PYTHON: python_file(declared), DOCS: documented(DOCS.read_text(), declared)}
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if check:
            print(f"{name} is not what src/spec/recipe_fields.h declares; run tools/declare.py")
        else:
            path.write_text(wanted[path])
            print(f"wrote {name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
