# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: the log-probability of a token when it is sampled (with a cache) and when
it is scored again (the whole sequence at once). INT8 attention gives a token the same bits both
times; what is left comes from the other layers. The published recipe, paper, shares scales between
tokens, and there the two differ. See docs/causality.md.    python examples/rl_logits.py"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import sagebwd
from sagebwd.integrations import transformers as sage

names = dict(sdpa=None, sagebwd="vectorwise", paper="paper")
for name, recipe in names.items():
    if recipe:
        sage.register(name, recipe=recipe)
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                     num_attention_heads=4, initializer_range=0.1)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).eval()
prompt = torch.randint(3, 256, (8, 64))
q, k, v = torch.randn(3, 1, 128, 4, 64)

for name, recipe in names.items():
    model.set_attn_implementation(name)
    with torch.no_grad():
        sampled = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0,
            min_new_tokens=64, max_new_tokens=64, return_dict_in_generate=True,
            output_logits=True, pad_token_id=0,
        )  # fmt: skip
        again = model(sampled.sequences).logits[:, 63:-1].log_softmax(-1)
    then = torch.stack(sampled.logits, 1).log_softmax(-1)
    tokens = sampled.sequences[:, 64:, None]
    ratio = (again.gather(2, tokens) - then.gather(2, tokens)).exp()
    print(f"{name:10} importance ratio: mean {ratio.mean():.4f}, "
          f"deviation {ratio.std():.6f}, from {ratio.min():.4f} to {ratio.max():.4f}")  # fmt: skip
    if recipe:  # attention alone: all tokens at once, and one after the other
        attend = lambda *qkv: sagebwd.attention(*qkv, causal=True, recipe=recipe)
        steps = [attend(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1]) for i in range(128)]
        differ = (attend(q, k, v) != torch.cat(steps, 1)).sum()
        print(f"{name:10} attention alone: {differ} of {q.numel()} values differ")
