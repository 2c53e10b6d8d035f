# SPDX-License-Identifier: Apache-2.0
"""Model sizes by name, each with a batch and a learning rate that suit it. A preset is a set of
defaults: every field can still be given on the command line."""

PRESETS = {
    # For tests: two layers, a few milliseconds a step on one core.
    "nano": dict(
        layers=2, width=64, heads=2, ffn=128, context=128,
        tokens_per_step=512, steps=100, warmup=10, lr=3e-3,
    ),
    # `make demo` on a CPU: learns the look of source code in a minute or two.
    "demo": dict(
        layers=4, width=128, heads=2, ffn=384, context=1024,
        tokens_per_step=4096, steps=100, warmup=10, lr=1e-3,
    ),
    # One GPU at 2.1M tokens per step, many steps a minute.
    "18m": dict(
        layers=6, width=256, heads=4, ffn=768, context=1024,
        tokens_per_step=262_144, steps=2000, warmup=100, lr=2e-3,
    ),
    # The model that runs/bias.sh trains.
    "45m": dict(
        layers=8, width=512, heads=8, ffn=1024, context=1024,
        tokens_per_step=262_144, steps=5000, warmup=200, lr=1.5e-3,
    ),
    "124m": dict(
        layers=12, width=768, heads=12, ffn=2048, context=1024,
        tokens_per_step=524_288, steps=20_000, warmup=700, lr=6e-4,
    ),
    # The published pre-training run: 78B tokens at 2.1M a step.
    "325m": dict(
        layers=20, width=1024, heads=16, ffn=3072, context=4096,
        tokens_per_step=2_097_152, steps=37_500, warmup=1000, lr=1e-3,
    ),
}  # fmt: skip
