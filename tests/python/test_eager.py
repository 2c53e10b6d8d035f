# SPDX-License-Identifier: Apache-2.0
"""Eager calls take a short way past the formulas that PyTorch keeps for compiled graphs. The way is
short, and it leads to the same bits, the same layouts and the same refusals."""

import os
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sagebwd
from sagebwd import _library
from sagebwd._ops import attention as ops

PACKAGE = os.path.join(os.path.dirname(sagebwd.__file__), "")
TORCH = os.path.dirname(torch.__file__)


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


WAYS = ["C++", "Python", "registered"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """The ways of a call to its kernels."""
    if request.param == "Python":
        monkeypatch.setattr(ops, "_attend", None)
    with Watched() if request.param == "registered" else nullcontext():
        yield request.param


def test_cpp_autograd_was_compiled():
    """The package that is tested is compiled for the PyTorch that tests it."""
    assert ops._attend is not None, f"build with the headers of PyTorch {torch.__version__}"


@pytest.mark.parametrize("content", (None, b"no library" * 100))
def test_without_cpp_autograd_info_says_why(content, tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "autograd", "C++")
    if content:
        (tmp_path / f"libsagebwd_autograd_{torch.__version__}.so").write_bytes(content)
    _library._load_autograd(tmp_path)
    why = "invalid ELF header" if content else "built with another PyTorch"
    assert why in _library.autograd
    assert "install sagebwd again" in _library.autograd


def every_way(call):
    """The results of a call in each way: they are equal, and lie in the same layout."""
    first = call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_attend", None)
        python = call()
    with Watched():
        registered = call()
    for other in (python, registered):
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recipe": "paper"},
        {"recipe": sagebwd.Recipe(save_codes=False)},
        {"backward": "bf16"},
    ],
    ids=["codes", "paper", "inputs", "bf16"],
)
def test_all_ways_give_the_same(options, layout):
    for inputs in (leaves(), leaves(hk=4, nk=40)):  # grouped queries, and k in the shape of q
        if layout == "bhsd":
            inputs = [t.detach().transpose(1, 2).requires_grad_() for t in inputs]
        every_way(lambda: results(inputs, layout=layout, **options))


def test_documents_and_lists_every_way():
    torch.manual_seed(8)
    q, k, v = (torch.randn(200, h, 64, requires_grad=True) for h in (4, 2, 2))
    cu = torch.tensor([0, 70, 70, 190], dtype=torch.int32)

    def packed():
        out, lse = sagebwd.attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.sum() + lse[:, :190].sum(), (q, k, v))]

    every_way(packed)
    dense = [torch.randn(1, 256, 2, 64, requires_grad=True) for _ in range(3)]
    lists = sagebwd.BlockLists.top_k(torch.randn(1, 2, 2, 4), k=2)

    def sparse():
        out = sagebwd.attention(*dense, blocks=lists)
        return [out, *torch.autograd.grad(out.square().sum(), dense)]

    every_way(sparse)


def test_errors_of_the_backward_keep_their_kind(way):
    """Here codes that came back too short from where a hook had kept them."""
    if way == "registered":
        pytest.skip("PyTorch's own wrapper")
    short = lambda t: t[:-16] if t.dtype == torch.uint8 else t
    inputs = leaves()
    with torch.autograd.graph.saved_tensors_hooks(short, lambda t: t):
        out = sagebwd.attention(*inputs)
    with pytest.raises(ValueError, match="^codes"):
        out.sum().backward()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_writing_to_the_result_is_noticed(way, layout):
    """The backward reads it."""
    out = sagebwd.attention(*leaves(hk=4, nk=40), layout=layout)
    loss = out.float().sum()
    with torch.no_grad():
        out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_is_refused(way):
    inputs = leaves()
    out = sagebwd.attention(*inputs)
    (dq, *_) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()
    out = sagebwd.attention(*inputs)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_the_gradient_runs_without_python():
    inputs = leaves()
    out = sagebwd.attention(*inputs)
    dout, calls = torch.randn_like(out), []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_filename))
    try:
        torch.autograd.grad(out, inputs, dout)
    finally:
        sys.setprofile(None)
    assert calls and not [name for name in calls if name.startswith(PACKAGE)]


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


SWITCHES = dict(
    deterministic=False,
    return_lse=False,
    return_max_logit=False,
    save_codes=True,
    tokens_first=False,
)


# From x [1, 2, 8, 64], what the short way hands back.
UNUSUAL = {
    "a lazy sign": lambda x: torch.complex(x, x).conj().imag,
    "channels apart": lambda x: torch.cat([x, x], -1)[..., ::2],
    "shapes alone": lambda x: x.to("meta"),
    "a cast": lambda x: x,  # by autocast
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_the_short_way_hands_back_goes_another(name):
    x = UNUSUAL[name](torch.randn(1, 2, 8, 64))
    dtype = torch.bfloat16 if name == "a cast" else x.dtype
    with torch.autocast(x.device.type, dtype) if name == "a cast" else nullcontext():
        assert ops.attend(x, x, x, ops.Options(), **SWITCHES) is None
        out = sagebwd.attention(x, x, x, layout="bhsd")
    assert out.shape == x.shape and out.dtype == dtype
    if not x.is_meta:
        plain = x.resolve_neg().contiguous().to(dtype)
        assert ops.attend(plain, plain, plain, ops.Options(), **SWITCHES) is not None
        assert torch.equal(out, sagebwd.attention(plain, plain, plain, layout="bhsd"))


def test_autocast_to_the_same_dtype_takes_the_short_way():
    q, k, v = leaves()
    with torch.autocast(q.device.type, q.dtype):
        assert ops.attend(q, k, v, ops.Options(), **SWITCHES | {"tokens_first": True}) is not None


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_mode_around_the_backward_sees_it(layout):
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, inputs = [], leaves(hk=4, nk=40)
    out = sagebwd.attention(*inputs, layout=layout)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    with Log():
        got = torch.autograd.grad(out, inputs, dout)
    assert torch.ops.sagebwd.bwd.default in seen
    for a, b in zip(got, want):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_profilers_show_both_directions():
    inputs = leaves()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        sagebwd.attention(*inputs).sum().backward()
    shapes = {e.name: e.input_shapes for e in profile.events()}
    assert shapes["sagebwd::fwd"][:3] == [list(t.shape) for t in inputs]
    assert "sagebwd::bwd" in shapes


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
        q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in inputs)
        return type(sagebwd.attention(q, k, v, layout="bhsd").grad_fn).__name__

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
    where = (PACKAGE, os.path.join(TORCH, "_library", ""), os.path.join(TORCH, "_ops"))
    ours = [f for f in calls if f.f_code.co_filename.startswith(where)]
    assert len(ours) < 55
