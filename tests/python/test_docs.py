# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ show works as it stands: Python blocks run, C++ and C blocks compile and
run against the installed library, commands have the options they are given. The API pages name
everything that is public."""

import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import sagebwd
from sagebwd import _library
from sagebwd.integrations import diffusers as diffusers_hook

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.S | re.M)
FRAMEWORKS = ("transformers", "diffusers")
# Commands of a block without a language: what they start with.
OURS = re.compile(r"^(?:\w+=\S+ )*(sagebwd|python -m sagebwd|torchrun .*-m sagebwd)\b")


def blocks(*languages):
    """(page, line, text) of every block in one of these languages."""
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match[1] in languages:
                line = text[: match.start()].count("\n") + 2
                yield pytest.param(
                    page, line, match[2], id=f"{page.relative_to(ROOT)}:{line}",
                    marks=[pytest.mark.slow] if needs(match[2]) else [],
                )  # fmt: skip


def needs(text):
    return [name for name in FRAMEWORKS if f"from {name} " in text]


@pytest.mark.cpu_only
@pytest.mark.parametrize("page, line, text", list(blocks("python")))
def test_python_block(page, line, text, tmp_path, monkeypatch, capsys):
    for name in needs(text):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), {"__name__": "__main__"})
    finally:
        if "diffusers" in needs(text):
            diffusers_hook.unregister()
    assert "nan" not in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("page, line, text", list(blocks("cpp", "c")))
def test_compiled_block(page, line, text, tmp_path):
    cpp = "#include <vector>" in text or ".hpp" in text
    source = tmp_path / ("block.cpp" if cpp else "block.c")
    source.write_text(text)
    root = _library.cmake_dir().parents[2]
    compiler = ["g++", "-std=c++20"] if cpp else ["gcc", "-std=c99"]
    flags = ["-Wall", "-Wextra", "-Werror", f"-I{root}/include", f"-L{root}/lib"]
    flags += ["-lsagebwd", f"-Wl,-rpath,{root}/lib"]
    for command in ([*compiler, source, "-o", tmp_path / "block", *flags], [tmp_path / "block"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def commands():
    """(page, command) of every line of a block that starts a program of ours."""
    for page in PAGES:
        if page.name == "cli.md":  # help texts, which another test compares
            continue
        for language, text in BLOCK.findall(page.read_text()):
            if language not in ("", "bash", "sh"):
                continue
            for line in text.replace("\\\n", " ").splitlines():
                if OURS.match(line):
                    yield page.relative_to(ROOT), line.split("  #")[0].strip()


def test_targets_presets_and_options_exist():
    """What blocks ask of make and of CMake, and the scripts that they start."""
    presets = (ROOT / "CMakePresets.json").read_text()
    make = (ROOT / "Makefile").read_text()
    cmake = "".join(
        path.read_text()
        for pattern in ("CMakeLists.txt", "cmake/*.cmake", "bindings/torch/CMakeLists.txt")
        for path in ROOT.glob(pattern)
    )
    seen = 0
    for page in PAGES:
        for text in (text for kind, text in BLOCK.findall(page.read_text()) if kind == ""):
            for line in (line.split("  #")[0] for line in text.splitlines()):
                where = f"{page.relative_to(ROOT)}: {line}"
                for target in re.findall(r"(?:^|&& )make ([\w-]+)", line):
                    assert re.search(rf"^(?:[\w -]+ )?{target}(?: [\w -]+)?:", make, re.M), where
                    seen += 1
                for preset in re.findall(r"cmake --preset (\w+)", line):
                    assert f'"name": "{preset}"' in presets, where
                for option in re.findall(r"-D(SAGEBWD_\w+)=", line):
                    assert option in cmake, where
                    seen += 1
                for script in re.findall(r"(?:^|python )((?:tools|runs)/\S+)", line):
                    assert (ROOT / script).exists(), where
                    seen += 1
    assert seen > 5


@functools.cache
def options_of(program, command):
    """The options that a program's help names."""
    if program == "sagebwd":
        argv = [os.path.join(os.path.dirname(sys.executable), "sagebwd"), *command]
    else:
        argv = [sys.executable, "-m", program]
    done = subprocess.run([*argv, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"(?<![\w-])(--?[a-zA-Z][\w-]*)", done.stdout))


@pytest.mark.long
def test_options_of_commands_exist():
    seen = 0
    for page, line in commands():
        words = shlex.split(line)
        words = words[words.index("-m") + 1 :] if "-m" in words else words[words.index("sagebwd") :]
        program, rest = words[0], words[1:]
        command = tuple(rest[:1]) if program == "sagebwd" and rest and rest[0][0] != "-" else ()
        if "--" in rest:  # sagebwd run: what follows is somebody else's
            rest = rest[: rest.index("--")]
        known = options_of(program, command)
        for word in rest:
            if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
                assert word.split("=")[0] in known, f"{page}: {line}"
                seen += 1
    assert seen > 10


@pytest.mark.long
def test_command_line_page():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs" / "cli.py", "--check"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def documented(page):
    return set(re.findall(r"^::: sagebwd\.(\S+)$", (ROOT / "docs/api" / page).read_text(), re.M))


def test_python_pages_name_everything_public():
    modules = {"integrations", "sla2"}
    names = {"attention" if n == "attention.attention" else n for n in documented("python.md")}
    assert names == set(sagebwd.__all__) - modules  # sagebwd.attention is a module's name, too
    assert documented("sla2.md") == {f"sla2.{name}" for name in sagebwd.sla2.__all__}
    pages = documented("integrations.md")
    named = {name.split(".")[1] for name in pages}
    by_name = {"torchtitan_override", "axolotl", "verl"}  # their frameworks import them
    assert named - by_name - {"report"} == set(sagebwd.integrations.__all__)


def test_public_names_have_docstrings():
    for name in sagebwd.__all__:
        assert (getattr(sagebwd, name).__doc__ or "").strip(), name
    for name in sagebwd.sla2.__all__:
        assert (getattr(sagebwd.sla2, name).__doc__ or "").strip(), name


@pytest.mark.parametrize("page, headers", [("cpp.md", "*.h"), ("c.md", "sagebwd.h")])
def test_c_pages_name_everything_public(page, headers):
    text = (ROOT / "docs/api" / page).read_text()
    listed = set(re.findall(r"`(\w+)", text)) | set(re.findall(r"\((\w+)\)`", text))
    for header in (ROOT / "include/sagebwd").glob(headers):
        if page == "cpp.md" and header.name in ("sagebwd.h", "version.h"):
            continue
        source = header.read_text()
        functions = re.findall(r"^SAGEBWD_(?:C_)?API [^;(]*?(\w+)\(", source, re.M)
        types = re.findall(r"^(?:struct|enum class|class SAGEBWD_API|enum) (\w+)", source, re.M)
        if page == "c.md":
            types = re.findall(r"^typedef struct (\w+)", source, re.M)
        assert functions or types, header
        for name in (*functions, *types):
            assert name in listed, f"{header.name}: {name}"


def test_troubleshooting_quotes_messages_that_exist():
    """Headings in backquotes are messages; … stands for what changes from call to call."""
    sources = ""
    for folder, endings in (("python", ("*.py",)), ("src", ("*.cpp", "*.h"))):
        for ending in endings:
            for path in sorted((ROOT / folder).rglob(ending)):
                text = path.read_text()
                text = re.sub(r'"\s*\n\s*f?"', "", text)  # a literal over several lines
                sources += text + text.replace('" "', "")
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.*)`$", page, re.M)
    assert len(messages) > 20
    for message in messages:
        parts = [part.strip() for part in message.split("…") if len(part.strip()) > 3]
        assert parts
        for part in parts:
            assert part in sources, f"no message has {part!r}"
