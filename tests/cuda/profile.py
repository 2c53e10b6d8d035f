# SPDX-License-Identifier: Apache-2.0
"""What the profiler says of each kernel that takes time, as JSON.

    python3 tests/cuda/profile.py build-gpu/bin/gpu_bench FILE cuda-sm80 cuda-sm90

`tools/gpu_check profile` keeps it as a record. Needs `ncu` and the right to read the counters.
"""

import csv
import io
import json
import os
import pathlib
import subprocess
import sys

SIZES = ("b8 n4096 h16 d128 full", "b8 n4096 h32 d64 full")
FORWARDS = 23  # gpu_bench: as many forward calls, then the backward ones
# Of each implementation: what a kernel is called here, recipe, name, launches before the one to
# look at, options. The implementation is pinned: some names belong to kernels of both.
KERNELS = {
    "cuda-sm80": [
        ("forward", "vectorwise", "forward_kernel", 0),
        ("forward's operands", "vectorwise", "operand_kernel", 0),
        ("fused", "vectorwise", "fused_kernel", 0),
        ("backward's operands", "vectorwise", "operand_kernel", FORWARDS),
        ("query_sums", "vectorwise", "query_sums_kernel", 0),
        ("fused", "paper", "fused_kernel", 0),
        ("fused, in turn", "vectorwise", "fused_kernel", 0, "--deterministic"),
        ("fused, in turn", "paper", "fused_kernel", 0, "--deterministic"),
    ],
    "cuda-sm90": [
        ("forward", "vectorwise", "forward_kernel", 0),
        ("forward's operands", "vectorwise", "codes_kernel", 0),
        ("backward", "vectorwise", "backward_kernel", 0),
        ("backward, in turn", "vectorwise", "backward_kernel", 0, "--deterministic"),
        ("backward's operands", "vectorwise", "query_piece_kernel", 0, "--codes"),
        ("query_sums", "vectorwise", "query_sums_kernel", 0),
    ],
}
STALLS = (
    "barrier",
    "math_pipe_throttle",
    "short_scoreboard",
    "long_scoreboard",
    "wait",
    "mio_throttle",
    "not_selected",
    "dispatch_stall",
)
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "smsp__inst_executed.sum": "instructions",
    "sm__inst_executed.avg.per_cycle_active": "instructions per cycle",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe %",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed": (
        "shared memory %"
    ),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "special functions %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "second-level cache %",
    **{
        f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio": f"stalled: {s}"
        for s in STALLS
    },
}


def profile(implementation, program, case, kernel, skipped, *options):
    text = subprocess.run(
        [
            "ncu",
            "--csv",
            "--print-units",
            "base",
            "--clock-control",
            "none",
            "--metrics",
            ",".join(METRICS),
            "-k",
            f"regex:{kernel}",
            "-s",
            str(skipped),
            "-c",
            "1",
            program,
            *options,
            case,
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SAGEBWD_IMPL": implementation},
    ).stdout
    table = text[text.index('"ID"') :]
    return {
        METRICS[row["Metric Name"]]: float(row["Metric Value"].replace(",", ""))
        for row in csv.DictReader(io.StringIO(table))
        if row["Metric Name"] in METRICS
    }


def main():
    program, target, *implementations = sys.argv[1:]
    results = []
    for size in SIZES:
        for implementation in implementations:
            for called, recipe, *what in KERNELS[implementation]:
                case = f"{size} {recipe}"
                r = {
                    "case": case,
                    "implementation": implementation,
                    "kernel": called,
                    **profile(implementation, program, case, *what),
                }
                print(
                    case,
                    implementation,
                    called,
                    f"{r['nanoseconds'] / 1e6:.2f} ms,",
                    f"{r['instructions per cycle']:.2f} instructions per cycle",
                    flush=True,
                )
                results.append(r)
    pathlib.Path(target).write_text(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
