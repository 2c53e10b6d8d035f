# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: each process holds a part of every sequence, and PyTorch's ring of attention
runs in INT8.    torchrun --nproc-per-node 2 examples/context_parallel.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from sagebwd.integrations import context_parallel as sage

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_rank())
mesh = init_device_mesh(device, (dist.get_world_size(),))

torch.manual_seed(0)  # the same weights and data everywhere
token, qkv = torch.nn.Embedding(64, 128), torch.nn.Linear(128, 384)
head = torch.nn.Linear(128, 64)
model = torch.nn.ModuleList([token, qkv, head]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = (torch.arange(256, device=device) + torch.arange(2, device=device)[:, None]) % 64
for step in range(1, 11):
    inputs, targets = rows[:, :-128].clone(), rows[:, 1:-127].clone()
    with (
        sage.enabled() as seen,
        context_parallel(mesh, buffers=[inputs, targets], buffer_seq_dims=[1, 1]),
    ):  # inside, the buffers hold this process's part
        q, k, v = qkv(token(inputs)).unflatten(2, (3, 2, 64)).permute(2, 0, 3, 1, 4)  # [b, h, s, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = head(out.transpose(1, 2).flatten(2))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step:2} loss {loss.item():.4f}", seen)
dist.destroy_process_group()
