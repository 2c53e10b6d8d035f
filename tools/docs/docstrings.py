# SPDX-License-Identifier: Apache-2.0
"""Turns the docstrings of this project into Markdown when the site is built. They are written to be
read by help(): a parameter stands on a line of its own above its indented text, examples are
indented, and names are marked as Sphinx does."""

import re

import griffe

ROLE = re.compile(r":(?:class|func|mod|meth):`~?([^`]+)`")
NAMES = re.compile(r"^[a-z_*][\w.*]*(?:, [a-z_*][\w.*]*)*$")


def markdown(text):
    lines, out = ROLE.sub(r"`\1`", text).split("\n"), []
    for i, line in enumerate(lines):
        following = lines[i + 1] if i + 1 < len(lines) else ""
        indented = following.startswith("    ") and following.strip()
        if NAMES.match(line) and indented:
            names = ", ".join(f"`{name}`" for name in line.split(", "))
            out += ["", f"- {names}:"]
        else:
            out.append(line)
    return "\n".join(out)


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg, **kwargs):
        seen = set()

        def visit(thing):
            if thing.is_alias or thing.path in seen:
                return
            seen.add(thing.path)
            if thing.docstring:
                thing.docstring.value = markdown(thing.docstring.value)
            for member in thing.members.values():
                visit(member)

        visit(pkg)
