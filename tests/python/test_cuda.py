# SPDX-License-Identifier: Apache-2.0
"""What only a GPU has: graphs, streams, and calls that do not wait."""

import pytest
import torch

import sagebwd
from reference import check, exact_grads, visible
from sagebwd._ops import attention as ops
from sagebwd.integrations import torch_sdpa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = ("out", "dq", "dk", "dv")


def tensors(s=300, d=64, h=4, dtype=torch.bfloat16):
    make = lambda: torch.randn(2, s, h, d, device="cuda", dtype=dtype)
    return [make().requires_grad_() for _ in range(3)], make()


def step(leaves, dout, deterministic=True, **options):
    # New leaves each time: the node that collects a leaf's gradient keeps the stream of its birth.
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = sagebwd.attention(*leaves, causal=True, deterministic=deterministic, **options)
    return (out, *torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("recipe", ["vectorwise", "paper"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [True, False])  # other kernels on Hopper
def test_matches_exact_attention(recipe, d, deterministic):
    leaves, dout = tensors(d=d)
    s = dout.shape[1]
    heads_first = [t.detach().transpose(1, 2) for t in (*leaves, dout)]
    want = exact_grads(*heads_first, mask=visible(s, s, True).cuda())
    gate = 0.12 if recipe == "paper" else 0.03
    got = step(leaves, dout, deterministic, recipe=recipe)
    for name, a, b in zip(NAMES, got, (want[0], *want[2:])):
        check(name, a.transpose(1, 2), b, gate)


def capture(leaves, dout, deterministic=True):
    """(graph, results) of a step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd and the allocator warm up outside the capture
        step(leaves, dout, deterministic)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaves, dout, deterministic)
    for t in captured:
        t.detach().fill_(float("nan"))
    return graph, captured


def renew(leaves):
    """New values in the same memory."""
    with torch.no_grad():
        for t in leaves:
            t.copy_(torch.randn_like(t))


def test_graph_replays_the_same_bits():
    leaves, dout = tensors()
    eager = step(leaves, dout)
    graph, captured = capture(leaves, dout)
    graph.replay()
    for name, a, b in zip(NAMES, captured, eager):
        assert torch.equal(a, b), name
    renew(leaves)
    graph.replay()
    for name, a, b in zip(NAMES, captured, step(leaves, dout)):
        assert torch.equal(a, b), name


def test_graph_with_sums_in_any_order():
    leaves, dout = tensors()
    graph, captured = capture(leaves, dout, deterministic=False)
    renew(leaves)
    graph.replay()
    for name, a, b in zip(NAMES, captured, step(leaves, dout, deterministic=False)):
        check(name, a, b, 0.005)  # the order of the sums changes the last of bf16's 8 bits


def test_calls_do_not_wait():
    leaves, dout = tensors()
    step(leaves, dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(leaves, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_do_not_disturb_each_other():
    problems = [tensors(s) for s in (257, 640)]
    alone = [step(*p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(10):
        torch.cuda.synchronize()
        together = []
        for stream, p in zip(streams, problems):
            with torch.cuda.stream(stream):
                together.append(step(*p))
        torch.cuda.synchronize()
        for a, b in zip(alone, together):
            for name, x, y in zip(NAMES, a, b):
                assert torch.equal(x, y), name


def test_compiled_with_graphs():
    leaves, dout = tensors(s=256)
    compiled = torch.compile(
        lambda q, k, v: sagebwd.attention(q, k, v, causal=True, deterministic=True),
        mode="reduce-overhead",
        fullgraph=True,
    )
    want = step(leaves, dout)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*leaves)
        got = (out.clone(), *(g.clone() for g in torch.autograd.grad(out, leaves, dout)))
    for name, a, b in zip(NAMES, got, want):
        assert torch.equal(a, b), name


def test_other_devices_are_refused():
    q = torch.randn(1, 16, 2, 64)
    with pytest.raises(ValueError, match="device"):
        sagebwd.attention(q.cuda(), q.cpu(), q.cuda())


def test_thousand_repeats():
    """Repeated runs give the same bits. dq is promised in deterministic mode only."""
    make = lambda: torch.randn(60, 130, 2, 64, device="cuda", dtype=torch.bfloat16)
    leaves, dout = [make().requires_grad_() for _ in range(3)], make()

    def run(deterministic):
        out, lse = sagebwd.attention(
            *leaves, causal=True, deterministic=deterministic, return_lse=True
        )
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    for deterministic in (True, False):
        first = run(deterministic)
        different = torch.zeros(5, dtype=torch.int64, device="cuda")
        for _ in range(1000):
            for i, (a, b) in enumerate(zip(run(deterministic), first)):
                different[i] += (a != b).sum()
        different = different.tolist()
        if not deterministic:
            del different[2]
        assert not any(different), (deterministic, different)


def exact_rows(q, k, v, dout, rows, scale):
    """out and dq of some query rows in float64; q, k, v, dout are [n, d] of one head, causal."""
    keys, values = k.double(), v.double()
    s = q[rows].double() @ keys.T * scale
    s = s.masked_fill(torch.arange(len(k), device=q.device)[None] > rows[:, None], -torch.inf)
    p = s.softmax(-1)
    out = p @ values
    dp = dout[rows].double() @ values.T
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    return out, ds @ keys * scale


@pytest.mark.parametrize(
    "shape",
    [(1025, 512, 32, 128), (1, 140_000, 1, 64)],
    ids=["more than 2^31 elements", "more than 133144 tokens"],
)
def test_large_sizes(shape):
    """Offsets beyond 32 bits, and sums beyond what one int32 holds."""
    b, n, h, d = shape
    make = lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    leaves, dout = [make().requires_grad_() for _ in range(3)], make()
    out, *grads = step(leaves, dout)
    rows = torch.tensor([0, 1, n // 2, n - 2, n - 1], device="cuda")
    for batch, head in {(0, 0), (b - 1, h - 1), (b // 2, h // 2)}:
        one = [t.detach()[batch, :, head] for t in (*leaves, dout)]
        want_out, want_dq = exact_rows(*one, rows, d**-0.5)
        check("out", out[batch, rows, head], want_out, 0.03)
        # Rows 0 and 1 see too few keys to have a relative accuracy.
        check("dq", grads[0][batch, rows[2:], head], want_dq[2:], 0.04)
    if n <= 512:
        last = [t.detach()[-1:, :, -1:].transpose(1, 2) for t in (*leaves, dout)]
        want = exact_grads(*last, mask=visible(n, n, True).cuda())
        for name, got, exact in zip(("dk", "dv"), grads[1:], want[3:]):
            check(name, got[-1:, :, -1:].transpose(1, 2), exact, 0.04)


def test_stride_products_beyond_32_bits():
    """A dout whose last token lies more than 2^31 elements after its first."""
    leaves, dout = tensors(s=64, h=1)
    memory = torch.empty(2 * 64 * (1 << 25), device="cuda", dtype=torch.bfloat16)
    wide = memory.view(2, 64, 1, 1 << 25)[..., :64]
    wide.copy_(dout)
    for name, a, b in zip(NAMES, step(leaves, wide), step(leaves, dout)):
        assert torch.equal(a, b), name


# --- packed batches with offsets on the GPU -------------------------------------------------------


def packed_tensors(total, d=64, h=2):
    make = lambda: torch.randn(total, h, d, device="cuda", dtype=torch.bfloat16)
    return [make() for _ in range(3)], make()


def packed_step(leaves, dout, cu, **options):
    """out, lse and the gradients, with the same offsets for queries and keys."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    out, lse = sagebwd.attention_varlen(
        *leaves, cu, cu, causal=True, deterministic=True, return_lse=True, **options
    )
    return (out, lse, *torch.autograd.grad(out, leaves, dout))


def offsets(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


PACKED_NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize("recipe", ["vectorwise", "paper"])
@pytest.mark.parametrize("d", [64, 128, 256])  # 256: kernels that read offsets on the host
def test_packed_offsets_on_either_side(recipe, d):
    leaves, dout = packed_tensors(700, d)
    for cu in (offsets(130, 131, 131, 400, 700), offsets(20, 555)):
        here = packed_step(leaves, dout, cu, recipe=recipe)
        there = packed_step(leaves, dout, cu.cuda(), recipe=recipe)
        for name, a, b in zip(PACKED_NAMES, there, here):
            assert torch.equal(a, b), name


def test_packed_calls_do_not_wait():
    leaves, dout = packed_tensors(700)
    cu = offsets(130, 400, 600).cuda()
    packed_step(leaves, dout, cu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed_step(leaves, dout, cu, max_seqlen_q=270, max_seqlen_k=270)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_packed_graph_takes_new_lengths():
    leaves, dout = packed_tensors(700)
    cu = offsets(130, 400, 700).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd and the allocator warm up outside the capture
        packed_step(leaves, dout, cu)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = packed_step(leaves, dout, cu)
    for ends in ((1, 2, 700), (130, 400, 700), (0, 700, 700), (9, 99, 999)):
        new = offsets(*ends)
        cu.copy_(new)
        for t in captured:
            t.detach().fill_(float("nan"))
        graph.replay()
        want = packed_step(leaves, dout, new.clamp(max=700))
        for name, a, b in zip(PACKED_NAMES, captured, want):
            assert torch.equal(a, b), name


def test_packed_nonsense_is_harmless():
    """Offsets nobody can check: tokens of no document give zeros, the rest what is left of them."""
    leaves, dout = packed_tensors(300)
    for wrong, right in (
        ([0, 200, 100, 250], [0, 200, 200, 250]),
        ([-(2**31), 2**31 - 1, 5, 7], [0, 300, 300, 300]),
    ):
        got = packed_step(leaves, dout, torch.tensor(wrong, dtype=torch.int32).cuda())
        want = packed_step(leaves, dout, torch.tensor(right, dtype=torch.int32))
        for name, a, b in zip(PACKED_NAMES, got, want):
            assert torch.equal(a, b), name
    nothing = torch.tensor([250, 250, 9], dtype=torch.int32).cuda()
    out, lse, *grads = packed_step(leaves, dout, nothing)
    assert not out.any() and torch.isneginf(lse).all() and not any(g.any() for g in grads)


# --- PyTorch's own attention, routed here ---------------------------------------------------------


def heads_first(**sizes):
    leaves, dout = tensors(**sizes)
    q, k, v, dout = (t.detach().transpose(1, 2).contiguous() for t in (*leaves, dout))
    return [t.requires_grad_() for t in (q, k, v)], dout


def padding(s):
    mask = torch.ones(2, 1, 1, s, dtype=torch.bool, device="cuda")
    mask[1, ..., s - 70 :] = False
    return mask


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("d", [64, 80, 128])
def test_sdpa_in_16_bits_runs_here(d, compiled):
    leaves, dout = heads_first(d=d)
    layer = lambda *t: torch.nn.functional.scaled_dot_product_attention(*t, is_causal=True)
    if compiled:
        layer = torch.compile(layer, fullgraph=True)
    with torch_sdpa.enabled() as seen:
        out = layer(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
    assert compiled or seen.calls == 1
    s = dout.shape[2]
    want = exact_grads(*(t.detach() for t in leaves), dout, mask=visible(s, s, True).cuda())
    for name, a, b in zip(NAMES, (out, *grads), (want[0], *want[2:])):
        check(name, a, b, 0.03)
    with torch.no_grad():  # INT8 shows: the 16-bit kernel of PyTorch is nearer
        assert not torch.equal(out, layer(*leaves))


def test_sdpa_with_a_padding_mask_runs_here():
    leaves, dout = heads_first()
    mask = padding(dout.shape[2])
    with torch_sdpa.enabled() as seen:
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
        grads = torch.autograd.grad(out, leaves, dout)
    assert seen.calls == 1 and not seen.passed_on
    want = exact_grads(*(t.detach() for t in leaves), dout, mask=mask)
    for name, a, b in zip(NAMES, (out, *grads), (want[0], *want[2:])):
        check(name, a, b, 0.03)


def test_an_encoder_trains_and_evaluates_here():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 2, 256, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).to("cuda", torch.bfloat16)
    x = torch.randn(2, 300, 128, device="cuda", dtype=torch.bfloat16)
    hidden = ~padding(300)[:, 0, 0]
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            want = model.double()(x.double(), src_key_padding_mask=hidden)
            model.to(torch.bfloat16)
            with torch_sdpa.enabled() as seen:
                got = model(x, src_key_padding_mask=hidden)
        assert seen.calls == 2 and not seen.passed_on
        check("encoder", got[~hidden], want[~hidden], 0.03)
    layer = torch.nn.TransformerEncoderLayer(128, 2, batch_first=True).to("cuda", torch.bfloat16)
    with torch_sdpa.enabled(), pytest.raises(NotImplementedError, match="dropout"):
        layer(x)


def test_no_query_heads_give_gradients_of_zero():
    q = torch.empty(2, 0, 30, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 4, 30, 64, device="cuda", dtype=torch.bfloat16)
    junk = torch.full((8, *k.shape), float("nan"), device="cuda")  # what freed memory may hold
    del junk
    options = ops.Options()
    out, lse, _ = ops.forward(q, k, k, options)
    dq, dk, dv = ops.backward(q, q, k, k, out, lse, None, options)
    assert dq.numel() == 0 and not dk.any() and not dv.any()


def sparse_case(d=64):
    """Inputs with two query heads to a key head, and lists of three of eight key blocks."""
    make = lambda n, h: torch.randn(2, n, h, d, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.requires_grad_() for t in (make(300, 4), make(500, 2), make(500, 2)))
    return q, k, v, sagebwd.BlockLists.top_k(torch.randn(2, 4, 3, 8, device="cuda"), k=3)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_block_lists_match_masked_attention(d, causal):
    q, k, v, lists = sparse_case(d)
    out = sagebwd.attention(q, k, v, blocks=lists, causal=causal)
    dout = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, (q, k, v), dout))
    mask = lists.to_mask().repeat_interleave(128, 2).repeat_interleave(64, 3)[..., :300, :500]
    if causal:
        mask = mask & torch.ones(300, 500, dtype=torch.bool, device="cuda").tril(200)
    x = [t.detach().double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    key, value = (t.repeat_interleave(2, 1) for t in x[1:])
    logits = (x[0] @ key.transpose(-1, -2) / d**0.5).masked_fill(~mask, float("-inf"))
    p = logits.softmax(-1).nan_to_num(0)
    want_out = p @ value
    want = (want_out, *torch.autograd.grad(want_out, x, dout.double().transpose(1, 2)))
    for name, a, b in zip(NAMES, got, want):
        check(name, a.transpose(1, 2), b, 0.04)


def test_block_lists_wait_for_nothing_and_are_read_at_replay():
    """A captured call takes the lists that are in memory when it is replayed."""
    q, k, v, lists = sparse_case()
    q, k, v = (t.detach() for t in (q, k, v))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = sagebwd.attention(q, k, v, blocks=lists)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sagebwd.attention(q, k, v, blocks=lists)
    graph.replay()
    assert torch.equal(out, first)
    lists.index.copy_((lists.index + 1) % 8)
    graph.replay()
    assert torch.equal(out, sagebwd.attention(q, k, v, blocks=lists))
    assert not torch.equal(out, first)


def test_block_lists_with_other_recipes_and_devices():
    """cuda-plain takes what the tuned kernels do not. Lists must lie beside q."""
    q, k, v, lists = sparse_case()
    fast = sagebwd.attention(q, k, v, blocks=lists)
    paper = sagebwd.attention(q, k, v, blocks=lists, recipe="paper")
    check("out", paper, fast, 0.1)
    with pytest.raises(ValueError, match="blocks.to"):
        sagebwd.attention(q, k, v, blocks=lists.to("cpu"))
    assert sagebwd.is_supported(q, k, v, blocks=lists)
