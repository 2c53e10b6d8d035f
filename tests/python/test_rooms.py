# SPDX-License-Identifier: Apache-2.0
"""The includes of src/ agree with the table of rooms in docs/design.md, and the table is sound."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".inl"}
PUBLIC = "include/sagebwd"


def rooms_of(design: str) -> dict[str, list[str]]:
    """Room → rooms, and single headers of rooms, that it may include. In the order of the table,
    the lowest first."""
    rows = re.findall(r"^\| `(?:src/)?([\w/]+)` \|[^|]*\|([^|]*)\|$", design, re.M)
    return {
        room: [name.strip(" `") for name in includes.split(",") if name.strip() != "–"]
        for room, includes in rows
    }


def room_of(path: str, rooms) -> str | None:
    """The innermost room that holds a path as #include spells it."""
    if path.startswith("sagebwd/"):
        return PUBLIC
    parents = [str(p) for p in Path(path).parents]
    return next((p for p in parents if p in rooms), None)


def faults_of_table(rooms: dict[str, list[str]]) -> list[str]:
    faults = []
    order = list(rooms)
    for room, allowed in rooms.items():
        for name in allowed:
            other = room_of(name, rooms) if name.endswith(".h") else name
            if other not in rooms:
                faults.append(f"{room} names {name}, which is no room")
            elif order.index(other) >= order.index(room):
                faults.append(f"{room} names {name}, which is not below it")
        if re.match(r"(ref|cpu|cuda|backend)\b", room) and {"dispatch", "api"} & set(allowed):
            faults.append(f"{room} is a backend and names dispatch or api")
        if re.fullmatch(r"cuda/sm\d+", room):
            faults += [
                f"{room} names {other}, another architecture"
                for other in allowed
                if re.match(r"cuda/sm\d+\b", other)
            ]
    return faults


def faults_of_sources(root: Path, rooms: dict[str, list[str]]) -> list[str]:
    faults, used = [], set()
    for file in sorted((root / "src").rglob("*")):
        if file.suffix not in SUFFIXES:
            continue
        path = file.relative_to(root / "src").as_posix()
        room = room_of(path, rooms)
        if room is None:
            faults.append(f"{path} is in no room")
            continue
        text = re.sub(r"//.*", "", file.read_text())
        for target in re.findall(r'#include "([^"]+)"', text):
            other = room_of(target, rooms)
            if other == room:
                continue
            name = target if target in rooms[room] else other
            used.add((room, name))
            if name not in rooms[room]:
                faults.append(f"{path} includes {target}, but {room} may not include {other}")
        if re.search(r"\basm\b", text) and room not in ("cuda/arch", "cpu/isa"):
            faults.append(f"{path} has asm, which belongs to cuda/arch")
        if re.search(r"#include <(\w*intrin|arm_neon)\.h>", text) and room != "cpu/isa":
            faults.append(f"{path} has vector instructions, which belong to cpu/isa")
    for room, allowed in rooms.items():
        inside = (root / "src" / room).is_dir()
        faults += [
            f"{room} may include {other} and does not"
            for other in allowed
            if inside and (room, other) not in used
        ]
    return faults


def test_the_drawn_graph_is_sound():
    rooms = rooms_of((ROOT / "docs/design.md").read_text())
    assert {"base", "backend", "dispatch", "cuda/sm80", "cuda/tile"} <= set(rooms)
    assert faults_of_table(rooms) == []


def test_sources_follow_it():
    rooms = rooms_of((ROOT / "docs/design.md").read_text())
    assert faults_of_sources(ROOT, rooms) == []


def test_device_code_counts_no_bits_by_the_standard_library():
    """CUDA 13.0 makes 0 of std::bit_width in device code, without a word, and the emulator cannot
    see it. numerics/octaves.h says so, and has the builtin."""
    count = re.compile(
        r"std::(bit_(width|ceil|floor)|count[lr]_|popcount|has_single_bit|rot[lr]\b)"
    )
    found = [
        file.name
        for room in ("base", "numerics", "cuda")
        for file in (ROOT / "src" / room).rglob("*")
        if file.suffix in SUFFIXES and count.search(file.read_text())
    ]
    assert found == ["octaves.h"]


TABLE = """
| room | what it is | includes |
|---|---|---|
| `include/sagebwd` | the public interface | – |
| `src/backend` | what backends answer | include/sagebwd |
| `src/cuda/arch` | instructions | – |
| `src/cuda/sm80` | kernels | backend, cuda/arch |
| `src/cuda/tuned` | what they share | backend |
| `src/cuda/sm90` | kernels | cuda/tuned/plan.h, backend |
| `src/dispatch` | the choice | backend, cuda/sm80 |
"""
FILES = {
    "backend/implementation.h": '#include "sagebwd/types.h"',
    "cuda/arch/scalar.cuh": 'asm("mov");',
    "cuda/sm80/run.cpp": '#include "backend/implementation.h"\n#include "cuda/arch/scalar.cuh"',
    "cuda/tuned/plan.h": '#include "backend/implementation.h"',
    "cuda/sm90/run.cpp": '#include "backend/implementation.h"\n#include "cuda/tuned/plan.h"  //asm',
    "dispatch/choose.cpp": '#include "backend/implementation.h"\n#include "cuda/sm80/run.h"',
}


def house(root: Path, **changes: str) -> list[str]:
    for path, text in (FILES | {k.replace("__", "/"): v for k, v in changes.items()}).items():
        file = root / "src" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return faults_of_sources(root, rooms_of(TABLE))


def test_a_sound_house_has_no_faults(tmp_path):
    assert faults_of_table(rooms_of(TABLE)) == [] and house(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("cuda/sm80/a.cpp", '#include "dispatch/choose.h"', "may not include dispatch"),
        ("cuda/sm90/a.cpp", '#include "cuda/sm80/run.h"', "may not include cuda/sm80"),
        ("cuda/sm90/a.cpp", '#include "cuda/tuned/plan.cuh"', "may not include cuda/tuned"),
        ("backend/a.h", '#include "cuda/arch/scalar.cuh"', "may not include cuda/arch"),
        ("cuda/sm80/a.cuh", 'asm volatile("mov");', "asm, which belongs to cuda/arch"),
        ("cuda/sm80/a.cuh", "#include <immintrin.h>", "vector instructions"),
        ("cuda/sm80/a.cuh", '#include "run.h"', "may not include None"),
        ("attic/a.h", "", "in no room"),
        ("cuda/sm90/run.cpp", '#include "cuda/tuned/plan.h"', "may include backend and does not"),
        ("cuda/sm90/run.cpp", '#include "backend/a.h"', "may include cuda/tuned/plan.h"),
    ],
)
def test_faults_of_sources_are_found(tmp_path, path, text, fault):
    faults = house(tmp_path, **{path.replace("/", "__"): text})
    assert len(faults) == 1 and fault in faults[0], faults


@pytest.mark.parametrize(
    ("room", "includes", "fault"),
    [
        ("cuda/sm80", "backend, cuda/arch, dispatch", "names dispatch, which is not below it"),
        ("cuda/sm80", "backend, dispatch", "is a backend and names dispatch"),
        ("cuda/sm90", "backend, cuda/sm80", "another architecture"),
        ("cuda/sm90", "backend, cuda/sm80/plan.h", "another architecture"),
        ("cuda/sm80", "backend, cuda/sm90/run.h", "names cuda/sm90/run.h, which is not below it"),
        ("backend", "attic", "no room"),
        ("backend", "attic/a.h", "no room"),
    ],
)
def test_faults_of_the_table_are_found(room, includes, fault):
    table = re.sub(rf"(`src/{room}` \|[^|]*\|)[^|]*\|", rf"\1 {includes} |", TABLE)
    assert any(fault in text for text in faults_of_table(rooms_of(table)))
