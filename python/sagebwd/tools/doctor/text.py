# SPDX-License-Identifier: Apache-2.0
"""The findings as lines of a terminal."""

import math

from .layers import TENSORS


def lines(findings):
    """``findings``: a :class:`.__main__.Findings`."""
    yield findings.title
    yield ""
    if findings.examined:
        yield from _table(findings.examined)
    whole = findings.whole
    yield (
        f"whole model: {whole.calls} calls in INT8; loss {whole.loss_int8:.5f}, without "
        f"{whole.loss:.5f}; gradients of all weights off by {whole.error:.2%}, at most "
        f"{whole.worst[1]:.2%} ({whole.worst[0]})"
    )
    for reason, count in whole.elsewhere.items():
        yield f"  elsewhere, {count} calls: {reason}"
    for t in findings.timed:
        yield (
            f"{t.tokens} tokens, forward and backward: {t.int8:.2f} ms, PyTorch {t.torch:.2f} ms, "
            f"{t.ratio:.2f} × ({', '.join(dict.fromkeys(t.kernels))})"
        )
    if findings.not_timed:
        yield f"not timed: {findings.not_timed}"
    yield ""
    yield from (sentence.replace("`", "") for sentence in findings.advice)


def _table(examined):
    width = max(len("attention call"), *(len(e.module) for e in examined))
    titles = "".join(f"{t:>8}" for t in TENSORS)
    yield f"{'attention call':{width}}{titles}  max logit     leak  verdict"
    for e in examined:
        errors = e.report.errors
        cells = "".join(f"{errors[t]:8.4f}" if errors else f"{'-':>8}" for t in TENSORS)
        top = f"{e.report.max_logit:9.2f}" if errors else f"{'-':>9}"
        leak = f"{'-':>7}" if math.isnan(e.leak) else f"{e.leak:7.4f}"
        yield f"{e.module:{width}}{cells}  {top}  {leak}  {e.report.verdict}"
    yield ""
