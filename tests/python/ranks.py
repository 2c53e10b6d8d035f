# SPDX-License-Identifier: Apache-2.0
"""Runs a function of a test module on two gloo ranks, each a process of its own."""

import os
import subprocess
import sys
import tempfile

RANKS = 2


def run(module, function, *arguments):
    """Calls module.function(rank, *arguments) on every rank and fails with its output if a rank
    does."""
    here = os.path.dirname(__file__)
    with tempfile.TemporaryDirectory() as directory:
        code = (
            f"import os, sys; sys.path.insert(0, {here!r}); import conftest, torch; "
            "import torch.distributed as dist; "
            f"torch.set_num_threads(1); rank = int(sys.argv[1]); "
            f"dist.init_process_group('gloo', init_method='file://{directory}/store', rank=rank, "
            f"world_size={RANKS}); "
            f"import {module}; {module}.{function}(rank, *{arguments!r}); "
            # The test is over at this point. A rank may die afterwards ("terminate called without
            # an active exception"), as if a thread had outlived the interpreter.
            "dist.destroy_process_group(); sys.stdout.flush(); os._exit(0)"
        )
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(r)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for r in range(RANKS)
        ]
        outputs = []
        try:
            for process in ranks:
                outputs.append(process.communicate(timeout=240)[0])
        finally:
            for process in ranks:
                process.kill()
    for process, output in zip(ranks, outputs):
        assert process.returncode == 0, output
