# SPDX-License-Identifier: Apache-2.0
"""Exact attention in float64, written out, the recipe's oracle, and error measures."""

import contextlib
import math
import os

import torch

# Gate of INT8 against exact attention on Gaussian inputs of unit deviation.
REL = 0.06
# Gates of lse against exact attention. A row with one key is one logit, whose INT8 error at d = 64
# has a deviation of 0.01 (measured; q and k each round by max / 127 / sqrt(12), and taking the
# first key out of the first 128 makes their maxima larger): five. The errors of many keys average
# out. The limits against the oracle are far tighter, see ORACLE.
LSE_ONE_KEY = 0.05
LSE = 0.02
# Kernels against the recipe's oracle, which rounds at the same points: only the order of float32
# sums differs.
ORACLE = 1e-5


def visible(sq, sk, causal=False, window=(-1, -1), align="bottom_right"):
    """[sq, sk] mask of what each query sees."""
    shift = sk - sq if align == "bottom_right" else 0
    i = torch.arange(sq)[:, None] + shift
    j = torch.arange(sk)[None, :]
    left, right = window
    mask = torch.ones(sq, sk, dtype=torch.bool)
    if left >= 0:
        mask &= j >= i - left
    if causal or right >= 0:
        mask &= j <= i + (0 if causal else right)
    return mask


def exact(q, k, v, mask=None, scale=None):
    """(out, lse) of [b, h, s, d] tensors in float64, differentiable; rows without a key give 0 and
    -inf."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask is None:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool)
    s = s.masked_fill(~mask, -math.inf)
    empty = ~mask.any(-1)
    lse = torch.logsumexp(s.masked_fill(empty[..., None], 0.0), -1)
    p = torch.exp(s - lse[..., None]).masked_fill(empty[..., None], 0.0)
    return p @ v, lse.masked_fill(empty, -math.inf)


def as_coded(q):
    """Queries as their INT8 codes stand. The default recipe multiplies them with all of a key, also
    with what its centre takes out; where that is large, it is what the log-sum-exp is of."""
    from sagebwd.tools.diagnosis import _codes, _rotated

    return _codes(_rotated(q), 1) @ _rotated(torch.eye(q.shape[-1])).double().mT


def exact_grads(q, k, v, dout, mask=None, scale=None, dlse=None):
    """(out, lse, dq, dk, dv) in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = exact(*leaves, mask, scale)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse * dlse.double())[torch.isfinite(lse)].sum()
    return (out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves))


# The oracle runs on the CPU, with the CPU's tiles; GPU kernels meet it in tests/cuda.
HAS_ORACLE = os.environ.get("SAGEBWD_TEST_DEVICE", "cpu") == "cpu"


def generator(seed):
    """Random numbers on the device of the tests."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@contextlib.contextmanager
def oracle():
    """Runs the recipe's scalar oracle instead of the kernels: the same rounding, none of the
    code."""
    before = os.environ.get("SAGEBWD_IMPL")
    os.environ["SAGEBWD_IMPL"] = "ref"
    try:
        yield
    finally:
        del os.environ["SAGEBWD_IMPL"]
        if before is not None:
            os.environ["SAGEBWD_IMPL"] = before


def rel(a, b):
    """Relative L2 error of a."""
    a, b = a.detach().double(), b.detach().double()
    norm = b.norm()
    return ((a - b).norm() / norm).item() if norm > 0 else (a - b).norm().item()


def cos_gap(a, b):
    """1 - cosine."""
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    return 1 - (a @ b / (a.norm() * b.norm())).item()


def check(name, got, want, gate=REL):
    assert torch.isfinite(got).all(), f"{name}: not finite"
    error = rel(got, want)
    assert error < gate, f"{name}: relative error {error:.4f}, gate {gate}"


def grads_of(function, q, k, v, dout):
    """(out, dq, dk, dv) of function(q, k, v) for fresh leaves."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def qkv(b=1, h=2, s=96, d=64, hk=None, sk=None, dtype=torch.float32):
    """Gaussian q, k, v as [b, h, s, d] and a dout."""
    hk, sk = hk or h, sk or s
    make = lambda *shape: torch.randn(*shape).to(dtype)
    return make(b, h, s, d), make(b, hk, sk, d), make(b, hk, sk, d), make(b, h, s, d)
