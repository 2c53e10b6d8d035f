# SPDX-License-Identifier: Apache-2.0
"""The imports of python/sagebwd agree with the table of its rooms in docs/design.md: the library
stands without what measures, trains and shows."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRONT = "*"  # the modules of the package itself
DOORS = {"sagebwd", "sagebwd.__main__", "sagebwd.bench", "sagebwd.bench_sparse"}
LIBRARY = {"_ops", FRONT, "integrations", "sla2", "launch"}
OTHERS = {"tools", "pages", "train", "evidence", "sla2.demo"}


def rooms_of(design):
    """Room → rooms and modules that it may import, the lowest first."""
    rows = re.findall(r"^\| `sagebwd\.([\w.*]+)` \|[^|]*\|([^|]*)\|$", design, re.M)
    return {room: [n.strip() for n in names.split(",") if n.strip() != "–"] for room, names in rows}


def room_of(module, rooms):
    """The innermost room of a module such as sagebwd.sla2.demo.page."""
    parts = module.split(".")[1:]
    inner = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((room for room in inner if room in rooms), FRONT)


def modules(package):
    """{module: file} of a package."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imports(module, file, known):
    """Modules of the package that a file imports, anywhere in it."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for name in node.names if base in known else ():
                inner = f"{base}.{name.name}"
                if inner not in known:
                    assert name.name in known[base].read_text(), f"{module}: there is no {inner}"
                yield inner if inner in known else base


def names_operators(file):
    nodes = ast.walk(ast.parse(file.read_text()))
    return any(
        isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.ops.sagebwd" for n in nodes
    )


def faults(package, rooms):
    known, out, used = modules(package), [], set()
    for module, file in known.items():
        room = room_of(module, rooms)
        for other in imports(module, file, known) if module not in DOORS else ():
            target = room_of(other, rooms)
            if target == room or other == "sagebwd":
                continue
            name = other.removeprefix("sagebwd.")
            name = name if name in rooms[room] else target
            used.add((room, name))
            if name not in rooms[room]:
                out.append(f"{module} imports {other}, but {room} may not import {target}")
        if room != "_ops" and module != "sagebwd._library" and names_operators(file):
            out.append(f"{module} names torch.ops.sagebwd, which is for _ops")
    for room, allowed in rooms.items():
        out += [f"{room} may import {x} and does not" for x in allowed if (room, x) not in used]
    return out


def test_the_table_is_sound():
    rooms = rooms_of((ROOT / "docs/design.md").read_text())
    assert set(rooms) == LIBRARY | OTHERS
    order = list(rooms)
    for room, allowed in rooms.items():
        assert not (room in LIBRARY and OTHERS & set(allowed)), f"{room} imports {allowed}"
        for name in allowed:
            if name in rooms:
                assert order.index(name) < order.index(room), f"{room} imports {name}"


def test_imports_follow_it():
    rooms = rooms_of((ROOT / "docs/design.md").read_text())
    assert faults(ROOT / "python/sagebwd", rooms) == []


def test_faults_are_found(tmp_path):
    package = tmp_path / "sagebwd"
    for name, text in {
        "__init__.py": "from .train import loop\n",
        "front.py": "def f():\n    from .train.loop import run\n",
        "train/__init__.py": "",
        "train/loop.py": "from .. import front\nimport torch\nrun = torch.ops.sagebwd.fwd\n",
    }.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)
    found = faults(package, {FRONT: [], "train": [FRONT, "tools"], "tools": []})
    assert found == [
        "sagebwd.front imports sagebwd.train.loop, but * may not import train",
        "sagebwd.train.loop names torch.ops.sagebwd, which is for _ops",
        "train may import tools and does not",
    ]
