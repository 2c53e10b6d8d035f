# SPDX-License-Identifier: Apache-2.0
"""What a build decides by itself (CUDA or not, for which GPUs), and what an installation holds."""

import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def configure(folder, *options, **environment):
    """The exit code and what CMake printed."""
    command = ["cmake", "-S", ROOT, "-B", folder / "build", "-DSAGEBWD_BUILD_TESTS=OFF",
               "-DSAGEBWD_BUILD_TOOLS=OFF", *options]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


# What nvcc may be, and what is said of it.
HALF = 'if [ "$1" = --version ]; then echo release 13.0; else echo "error: no gcc"; exit 1; fi'
UNUSABLE = {
    "exit 1": "does not run",
    "echo release 12.4, V12.4.131": "is version 12.4, 12.8 or later is needed",
    HALF: "cannot build a small program (error: no gcc)",
}


@needs_cmake
@pytest.mark.parametrize("nvcc", UNUSABLE)
def test_without_a_usable_nvcc_the_cpu_is_built_for(tmp_path, nvcc):
    path = str(program(tmp_path / "nvcc", nvcc))
    code, said = configure(tmp_path, CUDACXX=path)
    assert code == 0, said
    assert f"no CUDA backend: {path} {UNUSABLE[nvcc]}" in said


@needs_cmake
def test_who_insists_on_cuda_is_told_why_not(tmp_path):
    path = str(program(tmp_path / "nvcc", "echo release 11.8"))
    code, said = configure(tmp_path, "-DSAGEBWD_CUDA=ON", CUDACXX=path)
    assert code != 0
    assert "SAGEBWD_CUDA=ON:" in said and "12.8 or later is needed" in said


@pytest.mark.long
@needs_cmake
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "gpus, wanted",
    [("9.0\n9.0\n12.0", "90-real;120-real,"), ("7.5", "80-real;86-real;89-real;90-real;")],
)
def test_with_nvcc_cuda_is_built_for_the_gpus_that_are_here(tmp_path, gpus, wanted):
    program(tmp_path / "nvidia-smi", f"printf '{gpus}\\n'")
    code, said = configure(tmp_path, CUDACXX=NVCC, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 0, said
    assert f"CUDA backend for {wanted}" in said
    assert ("8.0 or later is needed" in said) == (gpus == "7.5")


# --- the installed package ------------------------------------------------------------------------


def test_metadata():
    about = importlib.metadata.metadata("sagebwd")
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description"].startswith("# sagebwd")
    assert about.get_all("Project-URL")


def test_the_library_is_there_once_and_the_program_starts():
    files = importlib.metadata.files("sagebwd")
    assert len([f for f in files if f.name.startswith("libsagebwd.so")]) == 1
    (script,) = [f.locate() for f in files if f.name == "sagebwd" and "bin" in f.parts[-2:]
                 and ".." in f.parts]  # fmt: skip
    done = subprocess.run([script, "info"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "built for CPU" in done.stdout and "chosen" in done.stdout
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert "\n  run  " in done.stdout and "\n  doctor  " in done.stdout, done.stdout
    assert done.stdout.index("doctor") < done.stdout.index("trace")


# --- the build backend ----------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch):
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "tools/package")
    spec = importlib.util.spec_from_file_location("backend", ROOT / "tools/package/backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_build_takes_the_headers_of_the_torch_that_is_here(backend):
    import torch

    assert backend.find_torch() == Path(torch.__file__).parent
    assert not any("torch" in need for need in backend.get_requires_for_build_wheel())


def test_a_build_asks_for_torch_only_where_none_is_new_enough(backend, monkeypatch, tmp_path):
    place = tmp_path / "torch"
    place.mkdir()
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda kind: str(tmp_path))
    assert backend.find_torch() is None
    (place / "version.py").write_text("__version__ = '2.10.1+cu128'\n")
    assert backend.find_torch() is None
    assert "torch>=2.11" in backend.get_requires_for_build_wheel()
    (place / "version.py").write_text("__version__ = '2.11.0'\n")
    assert backend.find_torch() == place


@pytest.mark.parametrize("writable", [True, False])
def test_a_read_only_source_tree_is_built_elsewhere(backend, monkeypatch, writable):
    given = []
    monkeypatch.setattr(backend.os, "access", lambda path, mode: writable)
    monkeypatch.setattr(backend._scikit, "build_wheel", lambda *a: given.append(a[1]) or "x.whl")
    assert backend.build_wheel("wheels") == "x.whl"
    place = given[0].get("build-dir")
    assert place is None if writable else ROOT not in Path(place).parents


def test_progress_of_a_build(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools/package")
    import progress

    out, log = io.StringIO(), tmp_path / ".ninja_log"
    rule = "build {}.o: CXX_COMPILER__core_Release {}.cpp || order\n"
    log.write_text("# ninja log v5\nof a build before\n")
    monkeypatch.setattr(progress, "_PAUSE", 0.01)
    with progress.Progress(tmp_path, out) as shown:
        assert shown.line(5) == "", "CMake runs"
        steps = "".join(rule.format(i, i) for i in range(40))
        (tmp_path / "build.ninja").write_text(steps + "build all: phony 1.o\n")
        assert shown.line(5) == "", "nothing is compiled yet"
        log.write_text(log.read_text() + "one\n" * 10)
        assert shown.line(50) == "sagebwd: 10 of 40 files compiled, about 2 min left"
        time.sleep(0.1)
    assert "10 of 40 files compiled" in out.getvalue()


def test_version_and_label(monkeypatch):
    spec = importlib.util.spec_from_file_location("version", ROOT / "tools/package/version.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import sagebwd

    assert module.dynamic_metadata("version") == sagebwd.__version__
    monkeypatch.setenv("SAGEBWD_WHEEL_LABEL", "cu130")
    assert module.dynamic_metadata("version") == f"{sagebwd.__version__}+cu130"
