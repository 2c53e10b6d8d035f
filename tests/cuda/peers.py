# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's own attention (FlashAttention-2 and cuDNN) on the shapes of gpu_bench.

One line per shape and backend: median milliseconds of 20 runs with device events.
"""

import argparse
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def median_ms(f, runs=20):
    for _ in range(3):
        f()
    times = []
    for _ in range(runs):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def measure(name, b, h, n, d, causal):
    q, k, v, g = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with sdpa_kernel(BACKENDS[name]):
        def forward():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        fwd = median_ms(forward)
        o = forward()
        bwd = median_ms(lambda: torch.autograd.grad(o, (q, k, v), g, retain_graph=True))
    flops = 4.0 * b * h * d * (n * (n + 1) / 2 if causal else n * n)
    tf = [f * flops / ms * 1e-9 for f, ms in ((1, fwd), (2.5, bwd), (3.5, fwd + bwd))]
    print(f"{name:6} b{b} n{n} h{h} d{d} {'causal' if causal else 'full':6} fwd {fwd:8.3f} ms {tf[0]:6.0f} TF/s  "
          f"bwd {bwd:8.3f} ms {tf[1]:6.0f} TF/s  sum {fwd + bwd:8.3f} ms {tf[2]:6.0f} TF/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=32768)
    args = parser.parse_args()
    for h, d in ((16, 128), (32, 64)):
        for causal in (True, False):
            for n in args.lengths:
                for name in BACKENDS:
                    measure(name, args.tokens // n, h, n, d, causal)


if __name__ == "__main__":
    main()
