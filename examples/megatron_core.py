# SPDX-License-Identifier: Apache-2.0
"""Megatron-core: one line of the layer spec.
torchrun --nproc-per-node 1 examples/megatron_core.py"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from sagebwd.integrations.megatron import SageDotProductAttention

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
parallel_state.initialize_model_parallel(1, 1)

spec = get_gpt_layer_local_spec()
spec.submodules.self_attention.submodules.core_attention = SageDotProductAttention  # this one
config = TransformerConfig(
    num_layers=2, hidden_size=128, num_attention_heads=4, attention_dropout=0.0,
    hidden_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=False,
    gradient_accumulation_fusion=False, masked_softmax_fusion=False,
)  # fmt: skip
model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=128,
                 max_sequence_length=64, position_embedding_type="rope").to(device)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = (torch.arange(64, device=device) + torch.arange(4, device=device)[:, None]) % 128
places = torch.arange(64, device=device).expand(4, 64)
causal = torch.ones(64, 64, dtype=torch.bool, device=device).triu(1)[None, None]  # True: hidden
for step in range(1, 6):
    loss = model(tokens, places, causal, labels=tokens.roll(-1, 1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
