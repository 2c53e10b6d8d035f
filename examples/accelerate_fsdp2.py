# SPDX-License-Identifier: Apache-2.0
"""accelerate with PyTorch's FSDP2: weights, gradients and optimizer are sharded over the processes.
accelerate launch --num-processes 2 examples/accelerate_fsdp2.py
Without a GPU: torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py"""

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from sagebwd.integrations import transformers as sage

sage.register()
config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                     num_attention_heads=2)  # fmt: skip
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sagebwd")

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model.to(accelerator.device)
# accelerate's own plugin (launch --use-fsdp --fsdp-version 2) does this in prepare(), on GPUs only.
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
rows = (torch.arange(64) + torch.arange(64)[:, None]) % 64
loader = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=4))
for step, tokens in enumerate(loader, 1):
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item():.4f}")
accelerator.print("weights are", type(next(model.parameters())).__name__)  # DTensor: sharded
accelerator.end_training()
