# SPDX-License-Identifier: Apache-2.0
"""Times the ways to install, each from nothing and without a compiler's cache.

    tools/record.py results/install/cpu.json python tools/package/time_installs.py {} wheel cpu

cpu: `pip install .` without CUDA; gpu: for one target, Hopper; wheel: a finished wheel. PyTorch is
there already; where it is not, pip fetches it first. Processor time is what a quiet machine would
need, whatever else this one does; it is divided by the cores, as compilers share them evenly.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
FLAGS = {
    "cpu": ["SAGEBWD_CUDA=OFF"],
    "gpu": ["SAGEBWD_CUDA=ON", "SAGEBWD_CUDA_ARCHITECTURES=90-real"],
}


def command_of(way, place):
    into = ["install", "--no-deps", "--no-build-isolation", "--target", str(place / "into")]
    if way == "wheel":
        return [*PIP, *into, str(max(ROOT.glob("dist/*.whl"), key=os.path.getmtime))]
    defines = [f"--config-settings=cmake.define.{flag}" for flag in FLAGS[way]]
    return [*PIP, *into, *defines, f"--config-settings=build-dir={place / 'build'}", str(ROOT)]


def timed(way):
    with tempfile.TemporaryDirectory(prefix="sagebwd-install-") as place:
        command = command_of(way, Path(place))
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(command, check=True, env={**os.environ, "CCACHE_DISABLE": "1"})
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "way": way,
            "processor_seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
            "seconds": time.monotonic() - began,
            "load": os.getloadavg()[1],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("ways", nargs="+", choices=("wheel", "cpu", "gpu"))
    args = parser.parse_args()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    machine = {"cpu": model, "cores": os.cpu_count()}
    record = {"machine": machine, "ways": [timed(way) for way in args.ways]}
    args.record.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
