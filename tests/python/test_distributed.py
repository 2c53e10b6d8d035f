# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks: ring attention through PyTorch's context parallel and called directly, FSDP2,
DTensors."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ranks
import sagebwd
from reference import check, exact_grads, rel, visible
from sagebwd.integrations import context_parallel as ring

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")


def _sequence(dtype=torch.float32, dv=64):
    """q, k, v, dout of the whole sequence, keys with a large mean."""
    g = torch.Generator().manual_seed(5)
    q, k, v, dout = (torch.randn(1, 2, 128, d, generator=g) for d in (64, 64, dv, dv))
    return tuple(t.to(dtype) for t in (q, k + 10 * torch.randn(64, generator=g), v, dout))


def _compare(got, want, gate=0.06):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        check(name, a, b, gate)


def _gather(t, dim=2):
    pieces = [torch.empty_like(t) for _ in range(ranks.RANKS)]
    dist.all_gather(pieces, t.contiguous())
    return torch.cat(pieces, dim)


def direct(causal, load_balance, rank, dv=64):
    q, k, v, dout = _sequence(dv=dv)
    order = [0, 3, 1, 2] if load_balance else [0, 1, 2, 3]  # the quarters as the ranks hold them
    quarters = [torch.cat([t.chunk(4, 2)[i] for i in order], 2) for t in (q, k, v, dout)]
    *mine, my_dout = (t.chunk(ranks.RANKS, 2)[rank].contiguous() for t in quarters)
    mine = [t.requires_grad_() for t in mine]
    out = ring.ring_attention(*mine, dist.group.WORLD, causal=causal, load_balance=load_balance)
    grads = torch.autograd.grad(out, mine, my_dout)
    got = [_gather(t.detach()) for t in (out, *grads)]
    got = [torch.cat([t.chunk(4, 2)[order.index(i)] for i in range(4)], 2) for t in got]
    want = exact_grads(q, k, v, dout, visible(128, 128, causal))
    _compare(got, (want[0], *want[2:]))


def direct_all(rank):
    for causal, load_balance in ((False, False), (True, False), (True, True)):
        direct(causal, load_balance, rank)
    direct(True, True, rank, dv=40)
    direct(True, False, rank, dv=20)


@pytest.mark.slow
def test_ring_attention():
    ranks.run("test_distributed", "direct_all")


def through_torch(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = init_device_mesh("cpu", (ranks.RANKS,))
    q, k, v, dout = _sequence()
    want = exact_grads(q, k, v, dout, visible(128, 128, True))
    shards = [t.clone() for t in (q, k, v, dout)]
    plain = F.scaled_dot_product_attention
    with ring.enabled(), context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4):
        leaves = [t.detach().clone().requires_grad_() for t in shards[:3]]
        assert leaves[0].shape[2] == 64
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        grads = torch.autograd.grad(out, leaves, shards[3])
        got = context_parallel_unshard(mesh, [out.detach(), *grads], [2] * 4)
    _compare(got, (want[0], *want[2:]))
    assert rel(got[0], want[0]) > 1e-4, "INT8 ran, not PyTorch's own kernel"
    assert F.scaled_dot_product_attention is plain
    assert not any("for_cpu" in str(op) for op in ring._torch_ring().custom_ops), "restored"


@pytest.mark.slow
def test_ring_through_context_parallel():
    ranks.run("test_distributed", "through_torch")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 3 * 64, bias=False)
        self.out = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 32).unbind(2)
        return x + self.out(sagebwd.attention(q, k, v, causal=True).flatten(2))


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())


def _train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x in batches:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    batches = torch.randn(5, 4, 40, 64, generator=torch.Generator().manual_seed(1))
    whole = _model()
    want = _train(whole, batches)
    model = _model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    got = _train(model, [x.chunk(ranks.RANKS)[rank] for x in batches])
    dist.all_reduce(got)
    torch.testing.assert_close(got / ranks.RANKS, want, rtol=1e-4, atol=1e-6)
    for a, b in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_fsdp2_equals_one_process():
    ranks.run("test_distributed", "fsdp")


def _sharded(mesh, placements, *tensors):
    from torch.distributed.tensor import distribute_tensor

    return [distribute_tensor(t, mesh, placements).requires_grad_() for t in tensors]


def _attend(*tensors, dout, dlse):
    """(out, lse, max_logit, dq, dk, dv)"""
    out, lse, top = sagebwd.attention(
        *tensors, layout="bhsd", causal=True, return_lse=True, return_max_logit=True
    )
    return out, lse, top, *torch.autograd.grad((out, lse), tensors, (dout, dlse))


def dtensor(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from sagebwd.integrations import dtensor as sage

    mesh = init_device_mesh("cpu", (ranks.RANKS,))
    g = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=g)
    q, dout, dlse = make(4, 4, 70, 64), make(4, 4, 70, 64), make(4, 4, 70)
    k, v = make(4, 2, 70, 64) + 3, make(4, 2, 70, 64)
    with pytest.raises(Exception, match="sharding strategy"):
        sagebwd.attention(*_sharded(mesh, [Shard(0)], q, k, v), layout="bhsd")
    sage.register()
    want = _attend(*(t.clone().requires_grad_() for t in (q, k, v)), dout=dout, dlse=dlse)

    # How q comes, how the result must lie. One tile of keys: dq has nothing to add up.
    for given, expected in [
        (Shard(0), Shard(0)),
        (Shard(1), Shard(1)),
        (Replicate(), Replicate()),
    ]:
        leaves = _sharded(mesh, [given], q, k, v)
        grads = (distribute_tensor(t, mesh, [given]) for t in (dout, dlse))
        got = _attend(*leaves, dout=next(grads), dlse=next(grads))
        for a, b in zip(got, want):
            assert a.placements == (expected,), (given, a.placements)
            assert torch.equal(a.full_tensor(), b), given

    # A gradient that lies otherwise than the result. Codes could not follow it, so that none are
    # kept.
    for given, other in [(Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(1), Replicate())]:
        leaves = _sharded(mesh, [given], q, k, v)
        grads = (distribute_tensor(t, mesh, [other]) for t in (dout, dlse))
        for a, b in zip(_attend(*leaves, dout=next(grads), dlse=next(grads)), want):
            assert torch.equal(a.full_tensor(), b), (given, other)
    with pytest.raises(Exception, match="codes of distributed tensors are not supported"):
        torch.ops.sagebwd.fwd(*leaves, *sagebwd._ops.attention.Options(), False, False, True)

    # Heads over one dimension of a mesh with two, the batch over the other.
    square = init_device_mesh("cpu", (1, ranks.RANKS))
    leaves = _sharded(square, [Shard(0), Shard(1)], q, k, v)
    out = sagebwd.attention(*leaves, layout="bhsd", causal=True)
    assert out.placements == (Shard(0), Shard(1)) and torch.equal(out.full_tensor(), want[0])

    # Three groups cannot be shared out, though six heads can: all is gathered.
    groups = make(2, 6, 40, 64), make(2, 3, 40, 64), make(2, 3, 40, 64)
    out = sagebwd.attention(*_sharded(mesh, [Shard(1)], *groups), layout="bhsd")
    assert torch.equal(out.full_tensor(), sagebwd.attention(*groups, layout="bhsd"))

    # Values of another head dim.
    narrow, dnarrow = make(4, 2, 70, 24), make(4, 4, 70, 24)
    tensors = [t.clone().requires_grad_() for t in (q, k, narrow)]
    for given in (Shard(0), Shard(1)):
        leaves = _sharded(mesh, [given], q, k, narrow)
        grads = (distribute_tensor(t, mesh, [given]) for t in (dnarrow, dlse))
        got = _attend(*leaves, dout=next(grads), dlse=next(grads))
        for a, b in zip(got, _attend(*tensors, dout=dnarrow, dlse=dlse)):
            assert torch.equal(a.full_tensor(), b), given

    # A sharded sequence is gathered.
    out = sagebwd.attention(*_sharded(mesh, [Shard(2)], q, k, v), layout="bhsd", causal=True)
    assert torch.equal(out.full_tensor(), want[0])

    # Packed: heads only.
    cu = torch.tensor([0, 30, 70], dtype=torch.int32)
    tokens = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    wanted = sagebwd.attention_varlen(*tokens, cu, cu, causal=True, return_lse=True)
    offsets = distribute_tensor(cu, mesh, [Replicate()])
    got = sagebwd.attention_varlen(
        *_sharded(mesh, [Shard(1)], *tokens), offsets, offsets, causal=True, return_lse=True
    )
    for a, b, placement in zip(got, wanted, (Shard(1), Shard(0))):
        assert a.placements == (placement,) and torch.equal(a.full_tensor(), b)


@pytest.mark.long
def test_dtensor():
    ranks.run("test_distributed", "dtensor")


def _refused_inside_context_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (2,))
    q, buffer = torch.randn(1, 32, 2, 16), torch.randn(1, 64)
    flat, cu = q[0], torch.tensor([0, 32], dtype=torch.int32)
    mask = torch.ones(2, 2, dtype=torch.bool)
    compiled = torch.compile(lambda q: sagebwd.attention(q, q, q), backend="eager")
    calls = (
        lambda: sagebwd.attention(q, q, q),
        lambda: compiled(q),
        lambda: sagebwd.attention_varlen(flat, flat, flat, cu, cu),
        lambda: sagebwd.flash_attn_func(q, q, q),
        lambda: sagebwd.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        lambda: sagebwd.linear_attention(q, q, q),
    )
    calls[1]()  # compiled outside: the graph must not be taken inside
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
        for call in calls:
            with pytest.raises(NotImplementedError, match="context_parallel.ring_attention"):
                call()
        assert "ring_attention" in sagebwd.is_supported(q, q, q).reason
        group = mesh.get_group()
        out = ring.ring_attention(*(q.transpose(1, 2),) * 3, group)
        assert out.shape == (1, 2, 32, 16)
    sagebwd.attention(q, q, q)


@pytest.mark.slow
def test_attention_of_part_of_a_sequence_is_refused():
    ranks.run("test_distributed", "_refused_inside_context_parallel")
