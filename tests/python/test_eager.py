# SPDX-License-Identifier: Apache-2.0
"""Eager calls take a short way past the formulas that PyTorch keeps for compiled graphs. The way is
short, and it leads to the same bits, the same layouts and the same refusals."""

import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

import sagebwd
from sagebwd import ops


class Watched(TorchFunctionMode):
    """A mode that only watches. Calls then go through the registered formulas."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def leaves(hk=2, n=40, nk=70, dtype=torch.bfloat16):
    torch.manual_seed(5)
    shapes = [(2, n, 4, 64), (2, nk, hk, 64), (2, nk, hk, 64)]
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def results(inputs, **options):
    """out, lse, max_logit and the gradients of a call."""
    options = dict(return_lse=True, return_max_logit=True, deterministic=True) | options
    out, lse, max_logit = sagebwd.attention(*inputs, causal=True, **options)
    torch.manual_seed(6)
    seeds = [torch.randn_like(out), torch.randn_like(lse)]
    return [out, lse, max_logit, *torch.autograd.grad([out, lse], inputs, seeds)]


@pytest.mark.parametrize(
    "options",
    [{}, {"recipe": "paper"}, {"recipe": sagebwd.Recipe(save_codes=False)}, {"backward": "bf16"}],
    ids=["codes", "paper", "inputs", "bf16"],
)
def test_both_ways_give_the_same(options):
    inputs = leaves()
    short = results(inputs, **options)
    with Watched():
        registered = results(inputs, **options)
    for a, b in zip(short, registered):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


def test_nobody_wanted_the_largest_logit():
    inputs = leaves()
    out, lse = sagebwd.attention(*inputs, return_lse=True)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout, retain_graph=True)  # lse unused
    again = torch.autograd.grad([out, lse], inputs, [dout, torch.zeros_like(lse)])
    for a, b in zip(got, again):
        assert (a - b).float().norm() < 0.01 * b.float().norm()
    # Gradients of lse alone reach q and k, and v has no part in it.
    lse = sagebwd.attention(*inputs, return_lse=True)[1]
    dq, dk, dv = torch.autograd.grad(lse.sum(), inputs)
    assert dq.norm() > 0 and dk.norm() > 0 and dv.norm() == 0


def test_without_gradients_there_is_no_graph():
    inputs = leaves()
    for call in (torch.no_grad, torch.inference_mode):
        with call():
            assert not sagebwd.attention(*inputs).requires_grad
    assert not sagebwd.attention(*(t.detach() for t in inputs)).requires_grad
    q, k, v = inputs
    out = sagebwd.attention(q.detach(), k, v.detach())  # only k wants one
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk.shape == k.shape


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "tokens outside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batch inside": lambda t: t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "part of a row": lambda t: torch.cat([t, t, t], -1)[..., 64:128],
    "every second token": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "one head for all": lambda t: t[:, :1].expand_as(t),
    "rows that overlap": lambda t: t.reshape(-1).as_strided(t.shape, (576, 128, 128, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("recipe", ["vectorwise", "paper"])
def test_results_lie_as_empty_like_says(layout, recipe):
    """And the values do not depend on the layout."""
    torch.manual_seed(7)
    q, k, v = (layout(torch.randn(2, 3, 3, 64)).requires_grad_() for _ in range(3))
    call = lambda *t: sagebwd.attention(*t, layout="bhsd", recipe=recipe)
    out = call(q, k, v)
    dout = torch.randn(out.shape)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for t, x in zip((out, *grads), (q, q, k, v)):
        # Beside codes, nobody remembers that the heads of k and v were one.
        if 0 not in x.stride():
            assert t.stride() == torch.empty_like(x).stride()
    plain = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    want = call(*plain)
    for a, b in zip((out, *grads), (want, *torch.autograd.grad(want, plain, dout))):
        assert torch.equal(a, b)


def test_subclasses_keep_their_class():
    class Mine(torch.Tensor):
        pass

    q = torch.randn(1, 8, 2, 64)
    out = sagebwd.attention(*(q.as_subclass(Mine) for _ in range(3)))
    assert type(out) is Mine
    assert torch.equal(out.as_subclass(torch.Tensor), sagebwd.attention(q, q, q))


def test_a_watched_operator_gives_results_with_a_graph():
    """`diagnose` relies on it: a mode can hook the gradient of the operator's result."""
    seen = []

    class Hook(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.sagebwd.fwd.default:
                result[0].register_hook(lambda g: seen.append(g.shape))
            return result

    inputs = leaves()
    with Hook():
        out = sagebwd.attention(*inputs)
    out.sum().backward()
    assert seen == [(2, 4, 40, 64)]


def test_a_default_device_does_not_watch():
    inputs = leaves()

    def node():
        (transposed,) = sagebwd.attention(*inputs).grad_fn.next_functions
        return type(transposed[0]).__name__

    name = node()
    with torch.device(inputs[0].device):
        assert node() == name
    with Watched():
        assert node() != name


def test_errors_keep_their_kind():
    q = torch.randn(1, 2, 8, 64, requires_grad=True)
    with pytest.raises(ValueError, match="recipe"):
        ops.forward(q, q, q, ops.Options(recipe="paper x=1"))
    out, lse, _ = ops.forward(q, q, q, ops.Options())
    with torch.no_grad(), pytest.raises(ValueError, match="lse"):
        ops.backward(out, q, q, q, out, lse[..., :3], None, ops.Options())


def test_few_steps():
    """Of Python, per forward and backward with their autograd. PyTorch's wrapper of registered
    formulas would more than double them."""
    inputs = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in leaves()]
    dout = torch.randn_like(inputs[0])

    def step():
        torch.autograd.grad(sagebwd.attention(*inputs, layout="bhsd"), inputs, dout)

    step()
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(frame) if "call" in event else None)
    try:
        step()
    finally:
        sys.setprofile(None)
    where = ("/sagebwd/", "/torch/_library/", "/torch/_ops")
    ours = [f for f in calls if any(w in f.f_code.co_filename for w in where)]
    assert len(ours) < 90
