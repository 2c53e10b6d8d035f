# SPDX-License-Identifier: Apache-2.0
"""Autograd keeps INT8 codes instead of q, k and v: the same bits, half the memory, and nothing
else changes."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sagebwd
from reference import generator, grads_of, qkv
from sagebwd._ops import attention as ops

CODES, INPUTS = sagebwd.Recipe(), sagebwd.Recipe(save_codes=False)


@pytest.fixture(autouse=True)
def _deterministic():
    """On a GPU dq has the same bits from run to run only if it is asked for."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def kept_by(call, *leaves):
    """The tensors that autograd keeps for the backward of a call, each memory once."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(*leaves)
    return list(kept.values())


def keeps_codes(call, *leaves):
    """Whether codes are kept. They and the inputs are never kept both."""
    kept = kept_by(call, *leaves)
    given = {t.untyped_storage().data_ptr() for t in leaves}
    codes = any(t.dtype == torch.uint8 for t in kept)
    inputs = any(t.untyped_storage().data_ptr() in given for t in kept)
    assert codes != inputs
    return codes


def both(call, tensors):
    """[(with codes, with inputs)] of (out, lse, dq, dk, dv), and without a gradient of lse of
    (out, dq, dk, dv). ``call(save_codes, *tensors)`` gives out and lse."""
    results = []
    for save_codes in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        run = lambda *t: call(save_codes, *t)
        assert keeps_codes(run, *leaves) == save_codes
        out, lse = run(*leaves)
        numbers = generator(1)
        dout = torch.randn(out.shape, generator=numbers).to(out.dtype)
        dlse = torch.randn(lse.shape, generator=numbers)
        results.append((out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))))
        results.append((out, *torch.autograd.grad(run(*leaves)[0], leaves, dout)))
    return [(results[0], results[2]), (results[1], results[3])]


def assert_same_bits(call, tensors):
    for with_codes, with_inputs in both(call, tensors):
        for a, b in zip(with_codes, with_inputs, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
            assert a.isfinite().any()


RECIPES = {
    "default": {},
    "no rotation": dict(rotate=False),
    "no centres": dict(smooth_k=False),
    "dither": dict(rounding="dither", seed=3),
    "dither:dQ": dict(rounding="dither:dQ", seed=3),
    "lifted": dict(high_precision=("dV", "dP")),
    "tiles": dict(tile_q=128, tile_k=64),
}


@pytest.mark.parametrize("changes", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("d", [40, 80, 128])
def test_the_same_bits(changes, d):
    q, k, v, _ = qkv(b=2, h=4, hk=2, s=67, sk=139, d=d, dtype=torch.bfloat16)
    k[:, :, :, 0] += 3
    recipe = sagebwd.Recipe(**changes)
    assert_same_bits(
        lambda save, *t: sagebwd.attention(
            *t,
            layout="bhsd",
            causal=True,
            recipe=replace(recipe, save_codes=save),
            return_lse=True,
        ),
        (q, k, v),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [dict(), dict(causal=True, align="top_left"), dict(window_size=(20, 5)), dict(softmax_scale=1)],
    ids=str,
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_same_bits_for_masks_dtypes_and_layouts(dtype, options, layout):
    q, k, v, _ = qkv(h=3, hk=1, s=129, sk=200, dtype=dtype)
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    assert_same_bits(
        lambda save, *t: sagebwd.attention(
            *t, **options, layout=layout, recipe=INPUTS if not save else CODES, return_lse=True
        ),
        (q, k, v),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_for_packed_batches(dtype):
    """Documents of all kinds, and tokens that belong to none."""
    cu_q = torch.tensor([0, 5, 5, 140, 141, 150], dtype=torch.int32)
    cu_k = torch.tensor([0, 130, 133, 400, 400, 409], dtype=torch.int32)
    q, (k, v) = torch.randn(160, 4, 64).to(dtype), torch.randn(2, 420, 2, 64).to(dtype)
    assert_same_bits(
        lambda save, *t: sagebwd.attention_varlen(
            *t, cu_q, cu_k, recipe=CODES if save else INPUTS, return_lse=True
        ),
        (q, k, v),
    )


def test_nan_and_inf_pass_through_codes():
    q, k, v, dout = qkv(b=2, s=150)
    q[0, 0, 3, 5], k[0, 1, 140, 7], v[1, 0, 20, 1] = torch.nan, torch.inf, torch.nan
    runs = [
        grads_of(lambda *t: sagebwd.attention(*t, layout="bhsd", recipe=r), q, k, v, dout)
        for r in (CODES, INPUTS)
    ]
    for a, b in zip(*runs):
        assert torch.equal(a.isnan(), b.isnan()) and a.isnan().any()
        assert torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


@pytest.mark.parametrize("d, most", [(64, 3.25), (128, 3.2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_that_are_kept(d, most, dtype):
    """Beside out and lse, which any attention keeps: 3 bytes per channel, and scales."""
    shape = (2, 1024, 4, d)
    leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]

    def beside_out(recipe):
        outs = []
        run = lambda *t: outs.extend(sagebwd.attention(*t, recipe=recipe, return_lse=True))
        kept = kept_by(run, *leaves)
        out, lse = outs
        mine = {t.untyped_storage().data_ptr() for t in (out, lse)}
        assert len([t for t in kept if t.untyped_storage().data_ptr() in mine]) == 2
        rest = [t for t in kept if t.untyped_storage().data_ptr() not in mine]
        return sum(t.numel() * t.element_size() for t in rest) / out.numel()

    assert beside_out(CODES) <= most
    assert beside_out(INPUTS) == 3 * leaves[0].element_size()


@pytest.mark.parametrize(
    "recipe",
    [
        sagebwd.Recipe.paper(),
        *(sagebwd.Recipe(high_precision=(m,)) for m in ("S", "O", "S'", "dQ", "dK")),
    ],
    ids=sagebwd.Recipe.text,
)
def test_recipes_whose_codes_do_not_suffice_keep_their_inputs(recipe):
    q, k, v, dout = qkv(s=70)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    call = lambda *t: sagebwd.attention(*t, layout="bhsd", recipe=recipe)
    assert not keeps_codes(call, *leaves)
    torch.autograd.grad(call(*leaves), leaves, dout)
    # The library agrees: it refuses to write codes that do not suffice.
    with pytest.raises(RuntimeError, match="expected a recipe whose codes replace q, k and v"):
        torch.ops.sagebwd.fwd(q, k, v, *ops.Options(recipe=recipe.text()), False, False, True)


def test_backward_in_bf16_keeps_its_inputs():
    leaves = [t.requires_grad_() for t in qkv(s=70)[:3]]
    call = lambda *t: sagebwd.attention(*t, layout="bhsd", backward="bf16")
    assert not keeps_codes(call, *leaves)


def test_the_option_reaches_every_front():
    """Also attention over a mask, and PyTorch's own function under the hook."""
    leaves = [t.requires_grad_() for t in qkv(s=40, dtype=torch.bfloat16)[:3]]
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    for save in (True, False):
        recipe = sagebwd.Recipe(save_codes=save)
        masked = lambda *t: sagebwd.masks.attention_with_mask(*t, mask, recipe=recipe)
        assert keeps_codes(masked, *leaves) == save

        def hooked(*t):
            with sagebwd.integrations.torch_sdpa.enabled(recipe=recipe):
                return torch.nn.functional.scaled_dot_product_attention(*t)

        assert keeps_codes(hooked, *leaves) == save


def test_nothing_is_kept_without_gradients():
    q, k, v, _ = qkv(s=40)
    call = lambda *t: sagebwd.attention(*t, layout="bhsd")
    assert kept_by(call, q, k, v) == []
    with torch.no_grad():
        assert kept_by(call, *(t.requires_grad_() for t in (q, k, v))) == []
    assert _writes_codes(lambda: call(q, k, v))
    with torch.no_grad():
        assert not _writes_codes(lambda: call(q, k, v))
    with torch.inference_mode():
        assert not _writes_codes(lambda: call(q, k, v))


@pytest.mark.cpu_only
def test_the_operators_of_pytorch_keep_their_inputs():
    """PyTorch's own autograd does, so that codes would come on top."""
    q, k, v = (t.requires_grad_() for t in qkv(s=40)[:3])
    with sagebwd.integrations.torch_sdpa.enabled() as report:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        assert not _writes_codes(lambda: flash(q, k, v))
    assert report.calls == 1


def _writes_codes(call):
    """Whether the operator is asked for codes: its last argument."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        call()
    (forward,) = (e for e in profile.events() if e.name == "sagebwd::fwd")
    return forward.concrete_inputs[-1]


def test_inputs_may_change_after_the_forward():
    """The backward does not look at them: PyTorch need not complain, and the gradient is that of
    the forward."""
    q, k, v, dout = qkv(s=100)

    def grads(recipe, spoil):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        copies = [t * 1.0 for t in leaves]
        out = sagebwd.attention(*copies, layout="bhsd", recipe=recipe)
        if spoil:
            with torch.no_grad():
                for t in copies:
                    t.fill_(torch.nan)
        return torch.autograd.grad(out, leaves, dout)

    for a, b in zip(grads(CODES, spoil=True), grads(CODES, spoil=False)):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(INPUTS, spoil=True)


def test_a_changed_result_is_noticed():
    """The backward does need out, and PyTorch watches over it."""
    leaves = [t.requires_grad_() for t in qkv(s=40)[:3]]
    out = sagebwd.attention(*leaves, layout="bhsd")
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_can_be_used_twice():
    q, k, v, dout = qkv(s=100)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = sagebwd.attention(*leaves, layout="bhsd")
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, leaves, dout)):
        assert torch.equal(a, b)


def test_some_gradients_alone():
    q, k, v, dout = qkv(s=100)
    want = grads_of(lambda *t: sagebwd.attention(*t, layout="bhsd", recipe=INPUTS), q, k, v, dout)
    for i in range(3):
        leaves = [t.clone().requires_grad_(i == j) for j, t in enumerate((q, k, v))]
        out = sagebwd.attention(*leaves, layout="bhsd")
        (got,) = torch.autograd.grad(out, leaves[i], dout)
        assert torch.equal(got, want[1 + i])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    q, k, v, dout = qkv(s=150)
    layer = lambda q, k, v: sagebwd.attention(q.sin(), k.sin(), v.sin(), layout="bhsd")
    want = grads_of(layer, q, k, v, dout)
    saved = lambda *t: checkpoint(layer, *t, use_reentrant=use_reentrant)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = saved(*leaves)
    for a, b in zip(want, (out, *_backward(out, leaves, dout))):
        assert torch.equal(a, b)


def _backward(out, leaves, dout):
    out.backward(dout)  # reentrant checkpoints know no torch.autograd.grad
    return [t.grad for t in leaves]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_keep_codes(dynamic):
    torch._dynamo.reset()

    def layer(q, k, v):
        return sagebwd.attention(q, k, v, causal=True).relu()

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for s in (150, 77):
        leaves = [torch.randn(1, s, h, 64, requires_grad=True) for h in (4, 2, 2)]
        assert keeps_codes(compiled, *leaves)
        got = torch.autograd.grad(compiled(*leaves).sum(), leaves)
        want = torch.autograd.grad(layer(*leaves).sum(), leaves)
        for a, b in zip(got, want):
            assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.long
def test_inductor():
    """It plans the memory of codes and stand-ins, and could choose other strides."""
    torch._dynamo.reset()

    def layer(q, k, v):
        return sagebwd.attention(2 * q, k.relu(), -v, causal=True).relu()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for s in (150, 77):
        leaves = [torch.randn(2, s, h, 64, requires_grad=True) for h in (4, 2, 2)]
        got = torch.autograd.grad(compiled(*leaves).sum(), leaves)
        want = torch.autograd.grad(layer(*leaves).sum(), leaves)
        for a, b in zip(got, want):
            assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing_keeps_the_results_of_attention(compiled):
    """The layer is computed again, attention is not: its codes are part of what is kept."""
    torch._dynamo.reset()
    ran = []

    def policy(context, op, *args, **kwargs):
        if op == torch.ops.sagebwd.fwd.default:
            ran.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q, k, v):
        return sagebwd.attention(2 * q, k.relu(), -v, causal=True)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    saved = lambda *t: checkpoint(layer, *t, use_reentrant=False, context_fn=contexts)
    if compiled:
        saved = torch.compile(saved, fullgraph=True, backend="aot_eager")
    leaves = [torch.randn(1, 150, h, 64, requires_grad=True) for h in (4, 2, 2)]
    got = torch.autograd.grad(saved(*leaves).sum(), leaves)
    assert ran
    for a, b in zip(got, torch.autograd.grad(layer(*leaves).sum(), leaves)):
        assert torch.equal(a, b)


def test_codes_can_be_offloaded():
    q, k, v, dout = qkv(s=150)
    layer = lambda *t: sagebwd.attention(*t, layout="bhsd")

    def offloaded(*t):
        with torch.autograd.graph.save_on_cpu():
            return layer(*t)

    for a, b in zip(grads_of(offloaded, q, k, v, dout), grads_of(layer, q, k, v, dout)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_no_second_derivative_without_an_error(needed):
    """The graph of the gradients does not lead to q, k and v through tensors that were kept. It
    leads there through out."""
    leaves = [t.requires_grad_() for t in qkv(s=40)[:3]]
    out = sagebwd.attention(*leaves, layout="bhsd")
    (first,) = torch.autograd.grad(out, leaves[0], torch.ones_like(out), create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(first.sum(), leaves[needed])


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return sagebwd.attention(q, k, v, causal=True)


def test_exported_for_training():
    q, k, v = (torch.randn(1, 40, h, 64, requires_grad=True) for h in (4, 2, 2))
    program = torch.export.export(Layer(), (q, k, v))
    leaves = [torch.randn(1, 40, h, 64, requires_grad=True) for h in (4, 2, 2)]
    assert keeps_codes(program.module(), *leaves)
    got = torch.autograd.grad(program.module()(*leaves).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad(Layer()(*leaves).sum(), leaves)):
        assert torch.equal(a, b)


def test_exported_for_inference():
    """A program has the switch that it was exported with: under no_grad it writes no codes."""
    for grad in (True, False):
        q = torch.randn(1, 40, 4, 64, requires_grad=True)
        with torch.set_grad_enabled(grad):
            program = torch.export.export(Layer(), (q, q, q))
        (call,) = (n for n in program.graph.nodes if n.target == torch.ops.sagebwd.fwd.default)
        assert call.args[-1] == grad


SHAPES = [
    ((1, 2, 2), (1, 1), 64),
    ((3, 6, 2), (67, 139), 40),
    ((2, 3, 1), (0, 128), 8),
    ((2, 3, 1), (129, 0), 80),
    ((0, 2, 2), (5, 5), 64),
]


@pytest.mark.parametrize("heads, lengths, d", SHAPES)
def test_size_from_shapes(heads, lengths, d):
    """The fake kernel, the operator and the library agree."""
    (b, h, hk), (s, sk) = heads, lengths
    q, k = torch.randn(b, h, s, d), torch.randn(b, hk, sk, d)
    options = ops.Options()
    arguments = (*options, False, False, True)
    codes = torch.ops.sagebwd.fwd(q, k, k, *arguments)[3]
    assert codes.dtype == torch.uint8
    meta = torch.ops.sagebwd.fwd(q.to("meta"), *[k.to("meta")] * 2, *arguments)[3]
    assert codes.shape == meta.shape == (ops.codes_bytes(q, k, k, None),)
    # The library refuses a backward whose codes are too short.
    if codes.numel() and s and sk:
        out, lse = torch.ops.sagebwd.fwd(q, k, k, *arguments)[:2]
        tensors = (out, q, k, k, out, lse, None)
        call = lambda c: torch.ops.sagebwd.bwd(*tensors, *options, False, False, c)
        call(codes)
        with pytest.raises(RuntimeError, match=f"codes: expected at least {codes.numel()} bytes"):
            call(codes[:-16].clone())


def test_size_of_packed_batches():
    q, k = torch.randn(70, 4, 64), torch.randn(300, 2, 64)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 70], [0, 129, 290]))
    options = ops.Options(cu_q, cu_k)
    codes = torch.ops.sagebwd.fwd(q, k, k, *options, False, False, True)[3]
    assert codes.shape == (ops.codes_bytes(q, k, k, cu_q),)


@pytest.mark.parametrize(
    "wrong",
    [lambda c: c.float(), lambda c: c[None]],
    ids=["dtype", "dimensions"],
)
def test_codes_of_another_kind_are_refused(wrong):
    q, k, v, dout = qkv(s=40)
    options = ops.Options()
    out, lse, _, codes = torch.ops.sagebwd.fwd(q, k, v, *options, False, False, True)
    with pytest.raises(ValueError, match="codes: expected the uint8 tensor that the forward gave"):
        ops.backward(dout, q, k, v, out, lse, None, options, codes=wrong(codes))


def at_an_odd_place(t):
    """A copy whose memory starts four bytes behind an aligned place."""
    flat = t.contiguous().view(-1).view(torch.uint8)
    arena = torch.empty(flat.numel() + 4, dtype=torch.uint8, device=t.device)
    arena[4:] = flat
    return arena[4:].view(t.dtype).view(t.shape)


@pytest.mark.parametrize(
    "unpack",
    [lambda t: torch.stack([t, t], -1)[..., 0], at_an_odd_place],
    ids=["strided", "not aligned"],
)
def test_hooks_may_bring_tensors_back_otherwise(unpack):
    q, k, v, dout = qkv(s=40)
    call = lambda *t: sagebwd.attention(*t, layout="bhsd")
    want = grads_of(call, q, k, v, dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        got = grads_of(call, q, k, v, dout)
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_a_packed_batch_without_documents_has_gradients():
    x = torch.randn(1, 1, 72, requires_grad=True)
    cu = torch.zeros(1, dtype=torch.int32)
    out = sagebwd.attention_varlen(x, x, x, cu, cu)
    out.sum().backward()
    assert not out.any() and not x.grad.any()
