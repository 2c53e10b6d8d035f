# SPDX-License-Identifier: Apache-2.0
"""The installed package as a whole: a C++ program against the libraries it carries."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "docs/install.md"

PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(consumer LANGUAGES CXX)
add_executable(app "{source}")
{lines}
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cpp_program_against_the_installed_package(tmp_path):
    """With the lines that docs/install.md shows."""
    (lines,) = re.findall(r"^```cmake\n(.*?)^```$", INSTALL.read_text(), re.S | re.M)
    cmake_dir = run(sys.executable, "-m", "sagebwd", "--cmake-dir").strip()
    (tmp_path / "CMakeLists.txt").write_text(
        PROJECT.format(source=ROOT / "examples" / "attention.cpp", lines=lines)
    )
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-Dsagebwd_DIR={cmake_dir}")
    run("cmake", "--build", tmp_path / "build")
    assert run(tmp_path / "build" / "app")


def test_one_binary_for_every_python():
    """No Python symbol in the libraries: what the py3-none wheel tag promises."""
    from sagebwd import _library

    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm")
    for root in _library.install_roots():
        path = root / "lib" / "libsagebwd_torch.so"
        if path.exists():
            symbols = run(nm, "-D", "--undefined-only", path)
            assert "torch_call_dispatcher" in symbols
            foreign = [s for s in symbols.split() if s.startswith("Py") or "c10" in s or "2at" in s]
            assert not foreign, foreign
            return
    raise AssertionError("no library")


def installed_binaries():
    from sagebwd import _library

    found = [
        path
        for root in _library.install_roots()
        for path in [*root.glob("lib/*.so"), *root.glob("bin/sagebwd")]
    ]
    assert found
    return found


def test_binaries_do_not_tell_where_they_were_built():
    import torch

    places = [ROOT, Path(torch.__file__).parent]
    for path in installed_binaries():
        for place in places:
            assert os.fsencode(f"{place}/") not in path.read_bytes(), (path, place)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_another_core_library_on_the_search_path_is_not_used(tmp_path):
    (tmp_path / "empty.c").write_text("")
    fake = tmp_path / "libsagebwd.so"
    run("cc", "-shared", "-Wl,-soname,libsagebwd.so", "-o", fake, tmp_path / "empty.c")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    out = run(
        sys.executable, "-c", "import sagebwd; print(open('/proc/self/maps').read())", env=env
    )
    assert "libsagebwd.so" in out and str(fake) not in out
    for program in (p for p in installed_binaries() if p.parent.name == "bin"):
        assert run(program, "--version", env=env)


def test_versions_that_differ_are_refused(monkeypatch):
    import sagebwd
    from sagebwd import _library

    class Other:
        version = "0.0.1"

        def locate_file(self, name):
            return _library.install_roots()[0]

    monkeypatch.setattr(_library.metadata, "distribution", lambda name: Other())
    with pytest.raises(ImportError, match=f"0.0.1.*{sagebwd.__version__}.*install"):
        _library._check_package()


@pytest.mark.slow
def test_source_archive_is_complete(tmp_path):
    """It holds every file of the repository, so that it can do all that a clone can."""
    pytest.importorskip("scikit_build_core")
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True
    ).stdout.split("\0")
    tracked = {name for name in tracked if name and (ROOT / name).is_file()}
    if not tracked:
        pytest.skip("no repository")
    code = f"import backend; backend.build_sdist({str(tmp_path)!r})"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools" / "package")}
    run(sys.executable, "-c", code, cwd=ROOT, env=env)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    assert tracked <= held, sorted(tracked - held)
