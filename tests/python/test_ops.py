# SPDX-License-Identifier: Apache-2.0
"""The operators with PyTorch's machinery: opcheck, compile, export, checkpointing, errors,
threads."""

import ctypes
import functools
import importlib
import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sagebwd
from reference import grads_of, qkv
from sagebwd._ops import attention as ops

CU = torch.tensor([0, 40, 40, 96], dtype=torch.int32)


def _dense(**options):
    q, k, v, dout = qkv(s=72, hk=1)
    return q, k, v, dout, ops.Options(causal=True, **options)


def _packed():
    q, k, v, dout = (t[0].transpose(0, 1) for t in qkv(s=96, hk=1))
    return q, k, v, dout, ops.Options(CU, CU, 56, 56, causal=True)


def _strided():
    """q, k, v as slices of one fused projection, heads after tokens."""
    fused = torch.randn(2, 40, 3, 2, 64)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    return q, k, v, torch.randn(2, 2, 40, 64), ops.Options(causal=True)


@pytest.mark.parametrize("case", [_dense, _packed, _strided], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("return_max_logit", [False, True])
def test_opcheck_forward(case, return_max_logit):
    q, k, v, _, options = case()
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    torch.library.opcheck(
        torch.ops.sagebwd.fwd.default, (q, k, v, *options, False, return_max_logit, False)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_forward_that_saves_codes(packed):
    """With shapes that leave no byte of the codes unwritten: opcheck compares them all."""
    if packed:
        q, k, v = (torch.randn(96, h, 64, requires_grad=True) for h in (4, 2, 2))
        cu = torch.tensor([0, 40, 96], dtype=torch.int32)
        options = ops.Options(cu, cu, 56, 56, causal=True)
    else:
        q, k, v = (torch.randn(1, h, 72, 64, requires_grad=True) for h in (8, 4, 4))
        options = ops.Options(causal=True)
    torch.library.opcheck(torch.ops.sagebwd.fwd.default, (q, k, v, *options, False, False, True))


@pytest.mark.parametrize("case", [_dense, _packed, _strided], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(case, with_dlse):
    q, k, v, dout, options = case()
    out, lse, _, codes = torch.ops.sagebwd.fwd(q, k, v, *options, False, False, True)
    dlse = torch.randn_like(lse) if with_dlse else None
    tensors = (dout, q, k, v, out, lse, dlse)
    for given in (None, codes):
        torch.library.opcheck(
            torch.ops.sagebwd.bwd.default, (*tensors, *options, False, False, given)
        )


def test_results_have_the_strides_of_their_tensors():
    for permute in [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)]:
        back = [permute.index(i) for i in range(4)]
        shape = (2, 4, 24, 32)
        q, k, v = (torch.randn([shape[i] for i in permute]).permute(back) for _ in range(3))
        out, lse, _ = ops.forward(q, k, v, ops.Options())
        assert out.stride() == q.stride() and lse.is_contiguous()
        grads = ops.backward(torch.randn(shape), q, k, v, out, lse, None, ops.Options())
        assert [g.stride() for g in grads] == [q.stride(), k.stride(), v.stride()]


def _step(q, k, v):
    out, lse = sagebwd.attention(q, k, v, causal=True, return_lse=True)
    return (out * 2).sum() + lse.sum()


def test_27_no_recompilation_for_new_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_step, fullgraph=True, dynamic=True, backend=counter)
    for s in (40, 72, *range(97, 145)):
        leaves = [torch.randn(1, s, 2, 32, requires_grad=True) for _ in range(3)]
        got = torch.autograd.grad(compiled(*leaves), leaves)
        want = torch.autograd.grad(_step(*leaves), leaves)
        for a, b in zip(got, want):
            assert torch.equal(a, b) and a.stride() == b.stride()
    assert counter.frame_count == 1


def test_27_no_recompilation_for_new_packed_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, cu, longest):
        return sagebwd.attention_varlen(q, q, q, cu, cu, longest, longest, causal=True).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for a, b in ((10, 30), (24, 7), (33, 41), (5, 64), (64, 128), (128, 5)):
        q = torch.randn(a + b, 2, 64, requires_grad=True)
        cu = torch.tensor([0, a, a + b], dtype=torch.int32)
        (got,) = torch.autograd.grad(compiled(q, cu, max(a, b)), q)
        (want,) = torch.autograd.grad(step(q, cu, max(a, b)), q)
        assert torch.equal(got, want)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="PyTorch's compiler needs Python.h (python3-dev)",
)
def test_28_compiled_code_runs_each_kernel_once():
    torch._dynamo.reset()
    q, k, v, dout = qkv(s=80)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def layer(q, k, v):
        return torch.relu(sagebwd.attention(q * 2, k, v, layout="bhsd") + 1)

    def counted(function):
        with torch.profiler.profile() as profile:
            grads = torch.autograd.grad(function(*leaves), leaves, dout)
        counts = {e.key: e.count for e in profile.key_averages()}
        assert (counts["sagebwd::fwd"], counts["sagebwd::bwd"]) == (1, 1)
        return grads

    want = counted(layer)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    # A cache on the disk knows the layer, not the code of our autograd formula.
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.autograd.grad(compiled(*leaves), leaves, dout)  # compiles
    got = counted(compiled)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return sagebwd.attention(q, k, v, causal=True)

    s = torch.export.Dim("s", min=2, max=4096)
    q = torch.randn(1, 40, 2, 64)
    program = torch.export.export(Layer(), (q, q, q), dynamic_shapes=({1: s}, {1: s}, {1: s}))
    assert "sagebwd.fwd" in program.graph_module.code
    q = torch.randn(1, 77, 2, 64)
    assert torch.equal(program.module()(q, q, q), sagebwd.attention(q, q, q, causal=True))


def _policy(saved, ctx, op, *args, **kwargs):
    if op == torch.ops.sagebwd.fwd.default:
        saved.append(ctx.is_recompute)
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def test_activation_checkpointing_is_bit_equal():
    q, k, v, dout = qkv(s=150)
    layer = lambda q, k, v: sagebwd.attention(q.sin(), k.sin(), v.sin(), layout="bhsd")
    want = grads_of(layer, q, k, v, dout)
    full = grads_of(lambda *t: checkpoint(layer, *t, use_reentrant=False), q, k, v, dout)
    saved = []
    contexts = functools.partial(
        create_selective_checkpoint_contexts, functools.partial(_policy, saved)
    )
    selective = grads_of(
        lambda *t: checkpoint(layer, *t, use_reentrant=False, context_fn=contexts), q, k, v, dout
    )
    assert saved, "the policy never met sagebwd.fwd"
    for a, b, c in zip(want, full, selective):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_transforms_are_refused():
    q = torch.randn(1, 8, 2, 64)
    f = lambda x: sagebwd.attention(x, x, x).sum()
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.grad(f)(q)
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.jvp(f, (q,), (q,))
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.vmap(lambda x: sagebwd.attention(x, x, x))(q[None])
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda x: torch.ops.sagebwd.fwd(x, x, x, *ops.Options(), *[False] * 3)[0])(
            q[None]
        )
    with pytest.raises(NotImplementedError, match="forward-mode"):
        with torch.autograd.forward_ad.dual_level():
            f(torch.autograd.forward_ad.make_dual(q, q))


def test_double_backward_is_refused():
    q = torch.randn(1, 8, 2, 64, requires_grad=True)
    (g,) = torch.autograd.grad(sagebwd.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        g.sum().backward()


def test_max_logit_is_not_differentiable():
    q = torch.randn(1, 8, 2, 64, requires_grad=True)
    out, max_logit = sagebwd.attention(q, q, q, return_max_logit=True)
    assert out.requires_grad and not max_logit.requires_grad


@pytest.mark.parametrize("op, before, after", [("fwd", 3, 3), ("bwd", 7, 3), ("explain", 3, 1)])
def test_options_are_those_that_the_library_declares(op, before, after):
    """bindings/torch/options.h has them, in this order."""
    names = [a.name for a in getattr(torch.ops.sagebwd, op).default._schema.arguments]
    assert tuple(names[before:-after]) == ops.Options._fields


def test_library_errors_become_python_errors(monkeypatch):
    q = torch.randn(1, 2, 8, 64)
    with pytest.raises(ValueError, match='got "x=1"'):
        ops.forward(q, q, q, ops.Options(recipe="paper x=1"))
    with pytest.raises(ValueError, match="channel stride 1"):
        ops.forward(q.transpose(2, 3).contiguous().transpose(2, 3), q, q, ops.Options())
    monkeypatch.setenv("SAGEBWD_IMPL", "cpu-none")
    with pytest.raises(NotImplementedError, match="SAGEBWD_IMPL pins cpu-none"):
        ops.forward(q, q, q, ops.Options())
    support = sagebwd.is_supported(q, q, q)
    assert not support and "SAGEBWD_IMPL pins cpu-none" in support.reason


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(softmax_scale=1e-50), "softmax_scale: .*float32, got 1e-50"),
        (dict(softmax_scale=float("nan")), "softmax_scale: .*nan"),
        (dict(softmax_scale=0.0), "softmax_scale: .*got 0"),
        (dict(max_seqlen_q=-2), "max_seqlen_q: .*got -2"),
        (dict(max_seqlen_k=5), "max_seqlen_k: expected -1 without cu_seqlens, got 5"),
        (dict(window_left=-2), "window: .*-2"),
        (dict(recipe=""), "recipe: .*got an empty text"),
        (dict(recipe="paper tile=64.9x64"), 'tile=64.9x64": expected a whole number'),
        (dict(recipe="paper tile=64x64 tile=128x64"), "tile is given twice"),
        (dict(recipe="paper lift=dX"), 'expected S, O, .*got "dX"'),
        (dict(cu_seqlens_q=CU), "expected both or neither"),
    ],
    ids=str,
)
def test_operators_refuse_what_the_front_refuses(change, words):
    """Exported graphs call the operators themselves."""
    q = torch.randn(1, 2, 8, 64)
    options = ops.Options(**change)
    lse = torch.zeros(1, 2, 8)
    for op, args in (
        (torch.ops.sagebwd.fwd, (q, q, q, *options, False, False, False)),
        (torch.ops.sagebwd.bwd, (q, q, q, q, q, lse, None, *options, False, False, None)),
    ):
        with pytest.raises(RuntimeError, match=f"sagebwd.ValueError: .*{words}"):
            op(*args)


def test_errors_of_compiled_code():
    """Wrong shapes and plain arguments are refused before the graph runs, with the right exception.
    Wrong values are found inside the graph, where PyTorch has one exception for all; the first word
    of its message is the kind."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, cu, scale: sagebwd.attention_varlen(q, q, q, cu, cu, softmax_scale=scale),
        backend="aot_eager",
    )
    q = torch.randn(8, 2, 64)
    cu = lambda *x: torch.tensor(x, dtype=torch.int32)
    for scale in (0.5, 0.25, 0.125):  # numbers become symbols
        want = sagebwd.attention_varlen(q, q, q, cu(0, 8), cu(0, 8), softmax_scale=scale)
        assert torch.equal(compiled(q, cu(0, 8), scale), want)
    with pytest.raises(ValueError, match="softmax_scale"):
        compiled(q, cu(0, 8), 1e-50)
    with pytest.raises(ValueError, match="int32"):
        compiled(q, cu(0, 8).long(), 0.5)
    with pytest.raises(RuntimeError, match="sagebwd.ValueError: cu_seqlens_q: .*start at 0"):
        compiled(q, cu(1, 8), 0.5)


# --- meta device and operation counts


@pytest.mark.parametrize("packed", [False, True])
def test_meta_device(packed):
    """Shapes, dtypes and strides without data, forward and backward."""

    def run(device):
        shape = (70,) if packed else (2, 70)
        leaves = [
            torch.randn(*shape, h, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
            for h in (4, 2, 2)
        ]
        cu = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
        call = sagebwd.attention_varlen if packed else sagebwd.attention
        offsets = (cu, cu, 40, 40) if packed else ()
        results = call(*leaves, *offsets, causal=True, return_lse=True, return_max_logit=True)
        loss = results[0].float().sum() + results[1].sum()
        return (*results, *torch.autograd.grad(loss, leaves))

    meta, real = run("meta"), run(None)
    for a, b in zip(meta, real, strict=True):
        assert a.is_meta and (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    q = torch.empty(1, 8, 2, 64, device="meta")
    assert sagebwd.is_supported(q, q, q)
    assert "1 to 256" in sagebwd.is_supported(q[..., :0], q[..., :0], q[..., :0]).reason
    with pytest.raises(ValueError, match="one head dim"):
        torch.ops.sagebwd.fwd(q, q[..., :32], q, *ops.Options(), *[False] * 3)


def _flops(call, *shapes, device=None):
    from torch.utils.flop_counter import FlopCounterMode

    leaves = [torch.randn(*s, device=device, requires_grad=True) for s in shapes]
    with FlopCounterMode(display=False) as counter:
        out = call(*leaves)
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.cpu_only  # PyTorch takes a kernel without a formula for float32 on a GPU
@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_counted_as_those_of_sdpa(causal):
    q, k = (2, 4, 48, 64), (2, 4, 80, 64)
    want = _flops(lambda *t: F.scaled_dot_product_attention(*t, is_causal=causal), q, k, k)
    ours = lambda *t: sagebwd.attention(*t, layout="bhsd", causal=causal)
    if want[0] == 0:
        pytest.skip("this PyTorch counts no attention on a CPU")
    assert want[0] == 2 * 2 * 2 * 4 * 48 * 80 * 64
    assert _flops(ours, q, k, k) == want
    assert _flops(ours, q, (2, 2, 80, 64), (2, 2, 80, 64)) == want  # grouped queries
    assert _flops(ours, q, k, k, device="meta") == want


def test_flops_of_documents_are_those_of_each():
    dense = [
        _flops(lambda *t: sagebwd.attention(*t, layout="bhsd"), *[(1, 2, n, 64)] * 3)
        for n in (40, 56)
    ]
    want = tuple(map(sum, zip(*dense)))
    packed = lambda *t: sagebwd.attention_varlen(*t, CU, CU)
    assert _flops(packed, *[(96, 2, 64)] * 3) == want
    # Offsets that nobody can read: the longest length for each document, as PyTorch does.
    cu = CU.to("meta")
    packed = lambda *t: sagebwd.attention_varlen(*t, cu, cu, 56, 56)
    assert _flops(packed, *[(96, 2, 64)] * 3, device="meta")[0] == 4 * 3 * 56 * 56 * 64 * 2


@pytest.mark.slow
def test_flop_formulas_come_with_the_counter():
    """We do not import the counter, but once a program does, the formulas are registered."""
    code = (
        "import sys, torch, sagebwd; assert 'torch.utils.flop_counter' not in sys.modules; "
        "import torch.utils.flop_counter as f; "
        "assert {torch.ops.sagebwd.fwd, torch.ops.sagebwd.bwd} <= set(f.flop_registry); "
        "assert not any('sagebwd' in type(x).__module__ for x in sys.meta_path)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_threads(threads):
    q, k, v, dout = qkv(h=3, s=300)
    f = lambda q, k, v: sagebwd.attention(q, k, v, layout="bhsd", causal=True)
    before = torch.get_num_threads()
    want = grads_of(f, q, k, v, dout)
    try:
        torch.set_num_threads(threads)
        got = grads_of(f, q, k, v, dout)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_call_from_within_a_parallel_region():
    """PyTorch's pool calls us on several of its threads at once: each call then runs on its own
    thread."""
    cpu = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    body_type = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    cpu.torch_parallel_for.argtypes = [ctypes.c_int64] * 3 + [body_type, ctypes.c_void_p]
    q, k, v, dout = qkv(h=3, s=200)
    f = lambda q, k, v: sagebwd.attention(q, k, v, layout="bhsd", causal=True)
    want = grads_of(f, q, k, v, dout)
    results, threads = {}, set()

    def body(begin, end, _):
        threads.add(threading.get_ident())
        for i in range(begin, end):
            results[i] = grads_of(f, q, k, v, dout)

    torch.set_num_threads(2)
    assert cpu.torch_parallel_for(0, 4, 1, body_type(body), None) == 0
    assert sorted(results) == [0, 1, 2, 3] and len(threads) == 2
    for got in results.values():
        for a, b in zip(got, want):
            assert torch.equal(a, b)


@pytest.mark.slow
def test_import_is_lean():
    """No device, no framework, and little time of the processor on top of torch."""
    code = (
        "import sys, time, torch; before = set(sys.modules); "
        "t = time.process_time(); import sagebwd; "
        "t = time.process_time() - t; new = set(sys.modules) - before; "
        "assert not torch.cuda.is_initialized(); "
        "frameworks = ('transformers', 'diffusers', 'triton', 'matplotlib'); "
        "foreign = [m for m in new if m.split('.')[0] in frameworks]; "
        "assert not foreign, foreign; print(t)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(out.stdout) < 0.3


def test_names_that_load_on_first_use():
    assert sagebwd.__getattr__("integrations") is importlib.import_module("sagebwd.integrations")
    diagnosis = importlib.import_module("sagebwd.tools.diagnosis")
    assert sagebwd.__getattr__("diagnose") is diagnosis.diagnose
    assert all(getattr(sagebwd, name) is not None for name in sagebwd.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        sagebwd.no_such_name


@pytest.mark.slow
@pytest.mark.cpu_only
def test_main():
    run = lambda *a: (
        subprocess.run(
            [sys.executable, "-m", "sagebwd", *a], capture_output=True, text=True, check=True
        ).stdout
    )
    assert (Path(run("--cmake-dir").strip()) / "sagebwdConfig.cmake").exists()
    info = run("info")
    assert "cpu-scalar" in info and "tiles" in info
