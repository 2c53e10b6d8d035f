# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers, then the error of INT8 attention in each layer.
python examples/transformers_trainer.py"""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments

import sagebwd
from sagebwd.integrations import transformers as sage

sage.register()
config = Qwen3Config(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32,
)  # fmt: skip
torch.manual_seed(0)
# For a checkpoint: from_pretrained(name, attn_implementation="sagebwd", dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sagebwd")

start, stride = torch.randint(0, 64, (512, 1)), torch.randint(1, 8, (512, 1))
tokens = (start + stride * torch.arange(48)) % 64  # arithmetic sequences modulo 64
arguments = TrainingArguments(
    "build/trainer", max_steps=60, per_device_train_batch_size=8, learning_rate=2e-3,
    logging_steps=20, save_strategy="no", report_to=[], disable_tqdm=True,
)  # fmt: skip
rows = [dict(input_ids=row, labels=row) for row in tokens]
Trainer(model=model, args=arguments, train_dataset=rows).train()

sample = tokens[:4].to(model.device)
print(sagebwd.diagnose(model, dict(input_ids=sample, labels=sample)))
