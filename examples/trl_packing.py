# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning with TRL. Packing puts several documents into one row; INT8 attention
keeps them apart.    python examples/trl_packing.py"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from sagebwd.integrations import transformers as sage

# In place of your checkpoint and your data:
words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="t0", unk_token="t0", eos_token="t1"
)
rows = [{"input_ids": [3 + (i + j) % 60 for j in range(8 + i % 25)]} for i in range(64)]
config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                     num_attention_heads=2)  # fmt: skip

sage.register()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sagebwd")
arguments = SFTConfig(
    "build/trl", packing=True, max_length=64, max_steps=20, per_device_train_batch_size=2,
    learning_rate=2e-3, logging_steps=10, report_to=[], save_strategy="no", disable_tqdm=True,
    bf16=torch.cuda.is_available(),
)  # fmt: skip
trainer = SFTTrainer(
    model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
)
trainer.train()
