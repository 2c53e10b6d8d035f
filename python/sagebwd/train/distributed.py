# SPDX-License-Identifier: Apache-2.0
"""One process or many, with PyTorch's own tools: torchrun starts the ranks, DDP copies the model or
FSDP2 shards it, and context parallel spreads one sequence over a ring.

``context_parallel`` neighbouring ranks share a sequence; other ranks read other sequences.
Gradients are averaged over all ranks, because every rank sees the same number of tokens.
"""

import contextlib
import os

import torch
import torch.distributed as dist

from .errors import BadInput


class World:
    """The ranks of a run as one of them sees them. Without torchrun: a world of one."""

    def __init__(self, config):
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.device = _device(config, int(os.environ.get("LOCAL_RANK", 0)))
        self.ring = config.context_parallel
        self._started = False
        if self.size % self.ring:
            raise BadInput(
                f"context_parallel: expected a divisor of the {self.size} ranks, got {self.ring}; "
                "start with torchrun --nproc-per-node"
            )
        if self.ring > 1 and config.context % (2 * self.ring):
            raise BadInput(
                f"context: expected a multiple of {2 * self.ring} for {self.ring} ranks of a "
                f"sequence, got {config.context}"
            )
        if self.ring > 1 and config.attention != "sagebwd" and self.device.type == "cpu":
            raise BadInput(
                "context_parallel: PyTorch's own ring attention has no CPU kernels; on a CPU only "
                "--attention sagebwd can share a sequence (lift= in --recipe takes matmuls out of "
                "INT8)"
            )
        # Ranks that read different sequences, and which of them this one is.
        self.readers, self.reader = self.size // self.ring, self.rank // self.ring
        self.config = config
        if self.size > 1:
            self._start()

    def _start(self):
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self._started = True
        self.mesh = dist.device_mesh.init_device_mesh(
            self.device.type, (self.readers, self.ring), mesh_dim_names=("data", "context")
        )

    @property
    def is_main(self):
        return self.rank == 0

    def wrap(self, model):
        """The model as the loop calls it."""
        if self.size == 1:
            return model
        if self.config.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.size,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)
        ids = [self.device.index] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def settle(self, model):
        """Call this after a forward without a backward: FSDP2 would otherwise keep the whole
        weights until the next forward."""
        if self.size > 1 and self.config.parallel == "fsdp":
            for module in (*model.blocks, model):
                module.reshard()

    @contextlib.contextmanager
    def accumulating(self, wrapped, is_last):
        """Gradients of micro-batches before the last stay on their rank."""
        if self.size == 1 or is_last:
            if self.size > 1 and self.config.parallel == "fsdp":
                wrapped.set_requires_gradient_sync(True)
            yield
        elif self.config.parallel == "fsdp":
            wrapped.set_requires_gradient_sync(False)
            yield
        else:
            with wrapped.no_sync():
                yield

    @contextlib.contextmanager
    def sharing(self, model, tokens, targets):
        """Within, tokens and targets [b, s] and the position tables are this rank's part of the
        sequence, and attention is a ring. The backward must run within."""
        if self.ring == 1:
            yield
            return
        from torch.distributed.tensor.experimental import context_parallel

        from ..integrations import context_parallel as int8_ring

        scope = contextlib.nullcontext()
        if self.config.attention == "sagebwd":
            scope = int8_ring.enabled(recipe=self.config.make_recipe())
        buffers = [tokens, targets, model.cos, model.sin]
        with (
            scope,
            context_parallel(
                self.mesh["context"],
                buffers=buffers,
                buffer_seq_dims=[1, 1, 0, 0],
                no_restore_buffers={tokens, targets},
            ),
        ):
            yield

    def mean(self, values):
        """Mean over the ranks of a tensor, in place."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def check_same(self, step):
        """Checks that all ranks chose the same checkpoint. Each chooses alone, and a disk error on
        one of them would make it begin elsewhere."""
        mean = self.mean(torch.tensor(float(step), dtype=torch.float64, device=self.device))
        if mean.item() != step:
            raise BadInput(
                f"resume: rank {self.rank} would go on after step {step}, other ranks elsewhere; "
                "not all of them can read the same checkpoints"
            )

    def barrier(self):
        if self.size > 1:
            dist.barrier()

    def close(self):
        if self._started:
            dist.destroy_process_group()


def _device(config, local_rank):
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device: cuda was asked for, but PyTorch sees no CUDA device")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise BadInput(
            f"device: local rank {local_rank}, but {torch.cuda.device_count()} CUDA devices"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
