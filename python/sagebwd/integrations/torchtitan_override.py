# SPDX-License-Identifier: Apache-2.0
"""Overrides for torchtitan's trainer. Importing this module needs torchtitan.

    --override.imports sagebwd.integrations.torchtitan_override.varlen
    --override.imports 'sagebwd.integrations.torchtitan_override.sdpa={"backward": "bf16"}'

The classes keep torchtitan's as bases, and with them its sharding: tensor parallelism, and for
``sdpa`` context parallelism, which becomes a ring of INT8 attention.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention

from ..recipe import as_recipe
from .context_parallel import _torch_ring, ring_attention
from .head_dims import padded
from .torchtitan import attend


def _refuse_keywords(given):
    """torchtitan's classes drop keywords they do not know."""
    if given:
        raise TypeError(f"unexpected keywords: {', '.join(sorted(given))}")


def _typed_like(q, *results):
    """Tells torchtitan's type checker that results are sharded as q, without q's last dimensions
    where a result has fewer."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        kind, spec = spmd.get_local_type(q), get_partition_spec(q)
        for t in results:
            cut = None if spec is None else spmd.PartitionSpec(*tuple(spec)[: t.dim()])
            spmd.assert_type(t, kind, cut)


class _OnMesh:
    """Refuses what torchtitan lets pass: without its mesh, the backend ``spmd_types`` leaves out
    the sums over ranks, and every layer of the model is wrong."""

    _needs_mesh = False

    def parallelize(self, parallel_dims):
        sharded = parallel_dims.tp > 1 or parallel_dims.cp > 1
        self._needs_mesh = sharded and parallel_dims.spmd_backend == "spmd_types"
        super().parallelize(parallel_dims)

    def _check_mesh(self):
        if self._needs_mesh and current_spmd_mesh() is None:
            raise RuntimeError(
                "sagebwd: this model is parallelized with spmd_types, but runs outside of its "
                "mesh, where torchtitan leaves out the sums over ranks: call it inside of "
                "torchtitan.distributed.utils.get_spmd_context(parallel_dims=...)(), and for "
                "activation checkpointing also torch.autograd.set_multithreading_enabled(False), "
                "as torchtitan's trainer does"
            )


class SageVarlenAttention(_OnMesh, VarlenAttention):
    """Packed documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        recipe: str = "vectorwise"
        backward: str = "int8"

    def __init__(self, config):
        torch.nn.Module.__init__(self)  # torchtitan's own activates a flash-attention kernel
        self.window_size = tuple(config.window_size)
        self.recipe, self.backward = as_recipe(config.recipe), config.backward

    def forward(
        self,
        q_BLNH,
        k_BLNH,
        v_BLNH,
        *,
        attention_masks,
        scale=None,
        enable_gqa=False,
        out_transform=None,
        **unknown,
    ):
        _refuse_keywords(unknown)
        self._check_mesh()
        if attention_masks is None:
            raise ValueError("attention_masks: expected VarlenMetadata, got None")
        with spmd.no_typecheck():
            out, lse = attend(
                q_BLNH, k_BLNH, v_BLNH, attention_masks, self.window_size, scale, enable_gqa,
                self.recipe, self.backward,
            )  # fmt: skip
        _typed_like(q_BLNH, out, lse)
        return out if out_transform is None else out_transform(out, lse)


class SageScaledDotProductAttention(_OnMesh, ScaledDotProductAttention):
    """Batches without documents, causal or full."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        recipe: str = "vectorwise"
        backward: str = "int8"

    def __init__(self, config):
        torch.nn.Module.__init__(self)
        self.recipe, self.backward = as_recipe(config.recipe), config.backward

    def forward(
        self,
        q_BLNH,
        k_BLNH,
        v_BLNH,
        *,
        attention_masks=None,
        scale=None,
        enable_gqa=False,
        is_causal=True,
        **unknown,
    ):
        _refuse_keywords(unknown)
        self._check_mesh()
        if attention_masks is not None:
            raise ValueError(
                "attention_masks: expected None for scaled dot-product attention; use "
                "torchtitan's variable-length attention for documents"
            )
        if isinstance(q_BLNH, DTensor):
            return self._ring(q_BLNH, k_BLNH, v_BLNH, scale, is_causal)
        with spmd.no_typecheck():
            window = (-1, 0 if is_causal else -1)
            out, _ = attend(
                q_BLNH, k_BLNH, v_BLNH, None, window, scale, enable_gqa, self.recipe, self.backward
            )
        _typed_like(q_BLNH, out)
        return out

    def _ring(self, q, k, v, scale, is_causal):
        """torchtitan's context parallelism gives the shards of a sequence as distributed
        tensors."""
        placements = {t.placements for t in (q, k, v)}
        if q.device_mesh.ndim != 1 or len(placements) != 1 or not q.placements[0].is_shard(1):
            raise NotImplementedError(
                "sagebwd: distributed tensors other than the shards of context parallelism are not "
                f"supported in torchtitan, got {placements}: give the module a sharding_config "
                "with a local_map, as torchtitan's models do"
            )
        width = v.shape[-1]
        local = (t.to_local().transpose(1, 2) for t in (q, k, v))
        *heads, scale = padded(*local, scale)
        out = ring_attention(
            *heads,
            q.device_mesh.get_group(),
            causal=is_causal,
            softmax_scale=scale,
            load_balance=is_causal and _torch_ring()._cp_options.enable_load_balance,
            recipe=self.recipe,
            backward=self.backward,
        )
        return out[..., :width].transpose(1, 2)


@override(target=VarlenAttention.Config, description="INT8 attention over packed documents")
def varlen(config, recipe="vectorwise", backward="int8"):
    """INT8 attention in place of torchtitan's attention over packed documents."""
    return derive(config, SageVarlenAttention.Config, recipe=recipe, backward=backward)


@override(target=ScaledDotProductAttention.Config, description="INT8 attention")
def sdpa(config, recipe="vectorwise", backward="int8"):
    """INT8 attention in place of torchtitan's scaled_dot_product_attention."""
    return derive(config, SageScaledDotProductAttention.Config, recipe=recipe, backward=backward)


_CLASSES = {
    VarlenAttention: SageVarlenAttention,
    ScaledDotProductAttention: SageScaledDotProductAttention,
}


def replacement(inner, recipe, backward):
    """A module for the place of one of torchtitan's; see :func:`.torchtitan.convert`."""
    if type(inner) not in _CLASSES:
        raise NotImplementedError(
            f"sagebwd: inner_attention of type {type(inner).__name__} is not supported: build the "
            'model with attn_backend="varlen" or "sdpa", or use InnerAttention by hand'
        )
    if "forward" in vars(inner):
        raise NotImplementedError(
            "sagebwd: inner_attention.forward is wrapped by context or tensor parallelism, which a "
            "new module would lose: convert before the model is parallelized, or use "
            "--override.imports sagebwd.integrations.torchtitan_override.varlen (or .sdpa)"
        )
    new = _CLASSES[type(inner)]
    given = {"window_size": inner.window_size} if isinstance(inner, VarlenAttention) else {}
    module = new(new.Config(**given, recipe=recipe, backward=backward))
    module._sharding_config = inner._sharding_config
    return module.train(inner.training)
