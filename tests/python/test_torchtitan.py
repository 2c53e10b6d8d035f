# SPDX-License-Identifier: Apache-2.0
"""The hook for torchtitan: against torchtitan's own classes, in its models, on two ranks."""

import pytest
import torch
import torch.nn.functional as F

import ranks
import sagebwd
from reference import check, exact_grads, grads_of, qkv, rel, visible
from sagebwd.integrations import torchtitan as sage

titan = pytest.importorskip(
    "torchtitan.models.common.attention", reason="torchtitan 0.3 is not installed",
    exc_type=ImportError,
)  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]

from sagebwd.integrations import torchtitan_override  # noqa: E402

CU = torch.tensor([0, 15, 40, 55, 80], dtype=torch.int32)
DOCUMENTS = titan.VarlenMetadata(CU, CU, 25, 25)


def _blnh(t):
    return t.transpose(1, 2)


@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"scale": 0.2}], ids=str)
def test_equals_titans_sdpa(options, gqa):
    q, k, v, dout = qkv(b=2, h=4, hk=2 if gqa else 4, s=50, d=32)
    config = titan.ScaledDotProductAttention.Config()
    own, new = config.build(), torchtitan_override.sdpa(config).build()
    assert isinstance(new, titan.ScaledDotProductAttention)
    call = lambda m: lambda *t: _blnh(m(*map(_blnh, t), enable_gqa=gqa, **options))
    own.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
    want, got = (grads_of(call(m), q, k, v, dout) for m in (own, new))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        check(name, a, b)
    assert rel(got[0], want[0]) > 1e-5, "INT8 ran"


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (8, 0)], ids=str)
@pytest.mark.parametrize("dims", [(32, 32), (48, 32)], ids=str)
def test_varlen(window, dims):
    """torchtitan's VarlenAttention runs on GPUs only: against float64, with its LSE."""
    d, dv = dims
    q, k, v = torch.randn(1, 4, 80, d), torch.randn(1, 2, 80, d), torch.randn(1, 2, 80, dv)
    dout, sink = torch.randn(1, 4, 80, dv), torch.randn(4)
    config = titan.VarlenAttention.Config(window_size=window)
    new = torchtitan_override.varlen(config).build()
    assert isinstance(new, titan.VarlenAttention)
    document = torch.bucketize(torch.arange(80), CU, right=True)
    seen = (document[:, None] == document) & visible(80, 80, window=window)

    def call(*tensors, **extra):
        rows = [_blnh(t).reshape(2, 40, *t.shape[1::2]) for t in tensors]
        options = dict(attention_masks=DOCUMENTS, scale=0.3, enable_gqa=True, **extra)
        return _blnh(new(*rows, **options).reshape(1, 80, 4, dv))

    want = exact_grads(q, k, v, dout, seen, 0.3)
    got = grads_of(call, q, k, v, dout)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:])):
        check(name, a, b)
    sunk = call(q, k, v, out_transform=lambda o, lse: o * torch.sigmoid(lse - sink)[..., None])
    check("sinks", sunk, want[0] * torch.sigmoid(want[1] - sink.view(1, 4, 1))[..., None])


def _llama(backend):
    llama3 = pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    config = llama3.llama3_configs["debugmodel"](backend)
    config.layers = config.layers[:2]
    return config


def _built(config):
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model.float()


def test_override_and_convert():
    from torchtitan.config.override import OverrideConfig, apply_overrides

    config = _llama("varlen")
    target = "sagebwd.integrations.torchtitan_override.varlen"
    entry = (target, {"backward": "bf16"})
    assert len(apply_overrides(OverrideConfig(imports=[entry]), config)) == 2
    model = _built(config)
    model.verify_module_protocol()
    inner = model.layers["0"].attention.inner_attention
    assert type(inner) is torchtitan_override.SageVarlenAttention and inner.backward == "bf16"

    other = _built(_llama("varlen"))
    before = [layer.attention.inner_attention for layer in other.layers.values()]
    undo = sage.convert(other, backward="bf16")
    other.verify_module_protocol()
    ids = torch.randint(0, 1000, (2, 40))
    positions = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, 40)
    out = other(ids, positions, DOCUMENTS)
    assert torch.equal(out, model(ids, positions, DOCUMENTS))
    F.cross_entropy(out.flatten(0, 1).float(), ids.flatten()).backward()
    grads = [p.grad for n, p in other.named_parameters() if "attention." in n]
    assert grads and all(g.norm() > 0 for g in grads)
    undo()
    assert before == [layer.attention.inner_attention for layer in other.layers.values()]


def test_refusals():
    class Block(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner_attention = inner

    wrapped = titan.ScaledDotProductAttention.Config().build()
    wrapped.forward = lambda *a, **k: None
    for inner, match in (
        (wrapped, "before the model is parallelized"),
        (titan.FlexAttention.Config().build(), "varlen"),
        (torch.nn.Identity(), "InnerAttention by hand"),
    ):
        block = Block(inner)
        with pytest.raises(NotImplementedError, match=match):
            sage.convert(block)
        assert block.inner_attention is inner
    q = torch.randn(1, 8, 4, 32)
    new = torchtitan_override.sdpa(titan.ScaledDotProductAttention.Config()).build()
    with pytest.raises(ValueError, match="variable-length"):
        new(q, q, q, attention_masks=DOCUMENTS)
    with pytest.raises(TypeError, match="score_mod"):
        new(q, q, q, score_mod=None)
    with pytest.raises(NotImplementedError, match="4 queries and 8 keys"):
        new(q[:, :4], q, q)
    packed = torchtitan_override.varlen(titan.VarlenAttention.Config()).build()
    with pytest.raises(ValueError, match="VarlenMetadata"):
        packed(q, q, q, attention_masks=None)
    with pytest.raises(NotImplementedError, match="object"):
        packed(q, q, q, attention_masks=object())


def context_parallel(rank):
    """torchtitan wraps the forward of converted modules: a ring over both ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel.api import apply_cp_to_forward, cp_shard

    mesh = init_device_mesh("cpu", (ranks.RANKS,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    x = [torch.randn(1, 128, heads, 32) for heads in (4, 2, 2)]
    new = torchtitan_override.sdpa(titan.ScaledDotProductAttention.Config()).build()
    apply_cp_to_forward([new], mesh)
    place = torch.arange(128)[None]
    for is_causal in (True, False):
        (*mine, at), _ = cp_shard(mesh, (*(t.clone() for t in x), place.clone()), None)
        out = new(*mine, is_causal=is_causal, enable_gqa=True)
        want = sagebwd.attention(*x, causal=is_causal)[:, at[0]]
        check(f"causal {is_causal}", out, want, 0.03)


def test_context_parallel():
    ranks.run("test_torchtitan", "context_parallel")


def _grads(model):
    names = ("qkv_linear.wqkv.weight", "attention.wo.weight")
    return {n: p.grad for n, p in model.named_parameters() if n.endswith(names)}


def tensor_parallel(rank):
    """All of torchtitan's backends, in one run: importing torchtitan takes longer than the test."""
    import torchtitan.distributed.parallel_dims as dims
    import torchtitan.tools.utils as tools

    tools.device_type, tools.device_module = "cpu", torch.cpu
    dims.device_type = "cpu"
    titan.ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
    for backend in ("partial_dtensor", "full_dtensor", "spmd_types"):
        for hooked in (False, True):
            _tensor_parallel(rank, backend, hooked)


def _tensor_parallel(rank, backend, hooked):
    """A model on two ranks against the same on one. Without the hook it has torchtitan's own
    attention, which shows that the comparison itself is right."""
    import torchtitan.distributed.utils as utils
    from torch.distributed.tensor import DTensor
    from torchtitan.distributed.full_dtensor import parallelize_inputs
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.models.llama3 import sharding

    utils.set_spmd_backend(backend)
    parallel = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=ranks.RANKS, pp=1, ep=1, world_size=ranks.RANKS,
        spmd_backend=backend,
    )  # fmt: skip
    parallel.build_mesh()

    def config():
        made = _llama("varlen")
        for layer in made.layers if not hooked else ():
            layer.attention.inner_attention = titan.ScaledDotProductAttention.Config()
        return made

    ids = torch.randint(0, 2048, (2, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, 40)
    documents = DOCUMENTS if hooked else None
    whole, sharded = config(), config()
    sharding.set_llama3_sharding_config(sharded, enable_sp=False)
    whole, model = _built(whole), _built(sharded)
    model.load_state_dict(whole.state_dict())
    if hooked:
        sage.convert(whole)
        sage.convert(model)
    want = whole(ids, positions, documents)
    want.square().sum().backward()
    model.parallelize(parallel)
    if backend == "full_dtensor":
        ids, _, extra = parallelize_inputs(parallel, ids, ids, {"positions": positions})
        positions = extra["positions"]
    # Only inside of its context does spmd_types sum over ranks.
    with utils.get_spmd_context(parallel_dims=parallel)():
        out = model(ids, positions, documents)
        out = out.full_tensor() if isinstance(out, DTensor) else out
        out.square().sum().backward()
    if out.shape != want.shape:  # the vocabulary is sharded
        want = want.chunk(ranks.RANKS, -1)[rank]
    check(backend, out, want, 1e-4)
    grads = _grads(model)
    for name, grad in _grads(whole).items():
        got = grads[name].full_tensor() if isinstance(grads[name], DTensor) else grads[name]
        if got.shape != grad.shape:
            grad = grad.chunk(ranks.RANKS, 1 if "wo" in name else 0)[rank]
        check(name, got, grad, 1e-4)
    if hooked and backend == "spmd_types":
        with pytest.raises(RuntimeError, match="get_spmd_context"):
            model(ids, positions, documents)
    with pytest.raises(NotImplementedError, match="InnerAttention by hand|parallelized"):
        sage.convert(model)


@pytest.mark.long
def test_tensor_parallel():
    ranks.run("test_torchtitan", "tensor_parallel")
