# SPDX-License-Identifier: Apache-2.0
"""What the profiler says of the forward and the fused backward kernel, as JSON.

    python3 tests/cuda/profile.py build-gpu/bin/gpu_bench FILE

`tools/gpu_check profile` keeps it as a record. Needs `ncu` and the right to read the counters.
"""

import csv
import io
import json
import pathlib
import subprocess
import sys

KERNELS = ("forward_kernel", "fused_kernel")
CASES = ("b8 n4096 h16 d128 full", "b8 n4096 h32 d64 full")
STALLS = ("barrier", "math_pipe_throttle", "short_scoreboard", "long_scoreboard", "wait",
          "mio_throttle", "not_selected", "dispatch_stall")
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "smsp__inst_executed.sum": "instructions",
    "sm__inst_executed.avg.per_cycle_active": "instructions per cycle",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe %",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed":
        "shared memory %",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "special functions %",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "second-level cache %",
    **{f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio": f"stalled: {s}"
       for s in STALLS},
}


def profile(program, case, kernel):
    text = subprocess.run(
        ["ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--metrics",
         ",".join(METRICS), "-k", f"regex:{kernel}", "-c", "1", program, case],
        capture_output=True, text=True, check=True).stdout
    table = text[text.index('"ID"'):]
    return {METRICS[row["Metric Name"]]: float(row["Metric Value"].replace(",", ""))
            for row in csv.DictReader(io.StringIO(table)) if row["Metric Name"] in METRICS}


def main():
    program, target = sys.argv[1:3]
    results = [{"case": case, "kernel": kernel, **profile(program, case, kernel)}
               for case in CASES for kernel in KERNELS]
    for r in results:
        print(r["case"], r["kernel"], f"{r['nanoseconds'] / 1e6:.2f} ms,",
              f"{r['instructions per cycle']:.2f} instructions per cycle")
    pathlib.Path(target).write_text(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
