# SPDX-License-Identifier: Apache-2.0
"""The hook for torchtitan: against torchtitan's own classes, in its models, on two ranks."""

import random

import pytest
import torch
import torch.nn.functional as F

import ranks
from reference import check, exact, grads_of, rel
from sagebwd.integrations import torchtitan as sage

titan = pytest.importorskip(
    "torchtitan.models.common.attention", reason="torchtitan 0.3 is not installed",
    exc_type=ImportError,
)  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]

from sagebwd.integrations import torchtitan_override  # noqa: E402

CU = torch.tensor([0, 15, 40, 55, 80], dtype=torch.int32)
DOCUMENTS = titan.VarlenMetadata(CU, CU, 25, 25)


def _exact_kernel(
    q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, num_splits=None,
):  # fmt: skip
    """torch.nn.attention.varlen.varlen_attn, which runs on GPUs only, in float64."""
    assert enable_gqa or q.shape[1] == k.shape[1]
    document = lambda cu, t: torch.bucketize(torch.arange(t.shape[0]), cu, right=True)
    place = lambda cu, t: torch.arange(t.shape[0]) - cu[document(cu, t) - 1]
    gap = place(cu_k, k) - place(cu_q, q)[:, None]
    left, right = (n if n >= 0 else 10**6 for n in window_size)
    seen = (document(cu_q, q)[:, None] == document(cu_k, k)) & (gap <= right) & (-gap <= left)
    out, lse = exact(*(t.transpose(0, 1)[None] for t in (q, k, v)), seen, scale)
    out = out[0].transpose(0, 1).to(q.dtype)
    return out if return_aux is None else (out, lse[0].float())


def _drawn(choose):
    """Random options: (config, sizes, keywords, the call has documents)."""
    packed = choose([True, False])
    heads, groups = choose([(4, 4), (4, 2), (6, 1)])
    d, dv = choose([(32, 32), (48, 32), (20, 12), (16, 24), (192, 128)])
    options = dict(enable_gqa=heads != groups, scale=choose([None, 0.07, 0.3]))
    if packed:
        config = titan.VarlenAttention.Config(
            window_size=choose([(-1, 0), (-1, -1), (9, 0), (5, 3), (0, 0)])
        )
    else:
        config = titan.ScaledDotProductAttention.Config()
        options["is_causal"] = choose([True, False])
    sizes = dict(b=choose([1, 3]), n=choose([1, 30, 65]), heads=heads, groups=groups, d=d, dv=dv)
    sink = packed and choose([True, False])
    return config, sizes, options, packed, sink, choose([torch.float32, torch.bfloat16])


@pytest.mark.parametrize("seed", range(4))
def test_random_options(seed, monkeypatch):
    """What torchtitan's own classes compute, gradients included."""
    math = [torch.nn.attention.SDPBackend.MATH]
    monkeypatch.setattr(titan, "varlen_attn", _exact_kernel)
    monkeypatch.setattr(titan.ScaledDotProductAttention, "sdpa_backends", math)
    draw = random.Random(seed)
    errors = []
    for _ in range(12):
        config, sizes, options, packed, sink, dtype = _drawn(draw.choice)
        torch.manual_seed(draw.randrange(1000))
        b, n, heads, groups, d, dv = sizes.values()
        case = f"{type(config).__qualname__}, {sizes}, {options}, {dtype}"
        if packed:
            window = config.window_size
            case += f", window {window}, sink {sink}"
            place = (torch.rand(b, n) < 0.9).int()
            place[:, 0] = 0  # a document begins where the position is 0
            documents = titan.create_varlen_metadata_for_document(place)
            options["attention_masks"] = documents
        if sink:
            sinks = torch.randn(heads)
            weight = lambda lse: torch.sigmoid(lse - sinks)[..., None]
            options["out_transform"] = lambda out, lse: (out * weight(lse)).to(out.dtype)
        make = lambda h, width: torch.randn(b, n, h, width).to(dtype)
        tensors = make(heads, d), make(groups, d), make(groups, dv)
        override = torchtitan_override.varlen if packed else torchtitan_override.sdpa
        own, new = config.build(), override(config).build()
        assert isinstance(new, type(own))
        call = lambda module: lambda *t: module(*t, **options)
        dout = make(heads, dv)
        want, got = (grads_of(call(m), *tensors, dout) for m in (own, new))
        for name, a, e in zip(("out", "dq", "dk", "dv"), got, want):
            assert a.dtype == e.dtype and a.shape == e.shape, f"{case}: {name}"
            if e.norm() > 1e-2 * dout.norm():  # dq and dk of one visible key are rounding errors
                check(f"{case}: {name}", a, e, 0.1)
        errors.append(rel(got[0], want[0]))
    assert max(errors) > 1e-3, "INT8 ran"


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


@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3"])
def test_models(family, monkeypatch):
    """Models of torchtitan, with its own attention and with this one."""
    monkeypatch.setattr(titan, "varlen_attn", _exact_kernel)
    module = pytest.importorskip(f"torchtitan.models.{family}", exc_type=ImportError)
    configs = getattr(module, f"{family.replace('_', '')}_configs")
    arguments = ("varlen", "standard") if family == "deepseek_v3" else ("varlen",)
    config = configs["debugmodel"](*arguments)
    config.layers = config.layers[:2]
    model = _built(config)
    ids = torch.randint(0, 1000, (2, 40))
    positions = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, 40)

    def step():
        model.zero_grad()
        out = model(ids, positions, DOCUMENTS)
        F.cross_entropy(out.flatten(0, 1).float(), ids.flatten()).backward()
        named = [p.grad.flatten() for n, p in model.named_parameters() if "attention." in n]
        return out.detach(), torch.cat(named)

    want, want_grads = step()
    undo = sage.convert(model)
    got, grads = step()
    check("logits", got, want, 0.03)
    check("gradients", grads, want_grads, 0.05)
    assert not torch.equal(got, want), "INT8 ran"
    undo()
    assert torch.equal(step()[0], want)


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
    new = torchtitan_override.sdpa(titan.ScaledDotProductAttention.Config()).build()
    apply_cp_to_forward([new], mesh)
    place = torch.arange(128)[None]
    for is_causal, balance, d, dv in (
        (True, "headtail", 32, 32),
        (True, None, 48, 32),
        (False, "headtail", 32, 32),
        (False, None, 20, 12),
    ):
        torch.manual_seed(0)
        x = [torch.randn(1, 128, h, width) for h, width in ((4, d), (2, d), (2, dv))]
        dout = torch.randn(1, 128, 4, dv)
        options = dict(is_causal=is_causal, scale=0.2, enable_gqa=True)
        (*mine, grad, at), _ = cp_shard(
            mesh, (*(t.clone() for t in x), dout.clone(), place.clone()), None, balance
        )
        got = grads_of(lambda *t: new(*t, **options), *mine, grad)
        window = (-1, 0 if is_causal else -1)
        alone = lambda *t: sage.InnerAttention(window_size=window)(*t, scale=0.2, enable_gqa=True)
        want = grads_of(alone, *x, dout)
        for name, a, e in zip(("out", "dq", "dk", "dv"), got, want):
            check(f"causal {is_causal}, balance {balance}: {name}", a, e[:, at[0]], 0.04)
    packed = torchtitan_override.varlen(titan.VarlenAttention.Config()).build()
    with pytest.raises(NotImplementedError):
        apply_cp_to_forward([packed], mesh)


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


def _check_types():
    """Out and LSE are sharded as q for torchtitan's type checker, here over heads."""
    import spmd_types as spmd

    q = torch.randn(2, 40, 4, 32)
    spmd.assert_type(q, {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)})
    seen = []
    module = torchtitan_override.varlen(titan.VarlenAttention.Config()).build()
    module(q, q, q, attention_masks=DOCUMENTS, out_transform=lambda *both: seen.extend(both))
    assert [spmd.get_local_type(t) for t in seen] == [spmd.get_local_type(q)] * 2


def _tensor_parallel(rank, backend, hooked):
    """A model on two ranks against the same on one. Without the hook it has torchtitan's own
    attention, which shows that the comparison itself is right."""
    import torchtitan.distributed.utils as utils
    from torch.distributed.tensor import DTensor
    from torchtitan.distributed.full_dtensor import parallelize_inputs
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
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
    checked = backend == "spmd_types"
    if checked:
        annotate_input_spmd_types(parallel, ids, ids.clone(), {"positions": positions})
    with utils.get_spmd_context(parallel_dims=parallel, spmd_typechecking=checked)():
        out = model(ids, positions, documents)
        out = out.full_tensor() if isinstance(out, DTensor) else out
        out.square().sum().backward()
        if checked:
            _check_types()
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
