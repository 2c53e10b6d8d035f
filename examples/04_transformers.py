# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model trained with INT8 attention, checked layer by layer, and used to generate.

Run it with: python examples/04_transformers.py (needs: pip install transformers)
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import sagebwd
from sagebwd.integrations import transformers as sage

config = Qwen3Config(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


def batch(step):
    """Arithmetic sequences modulo 64: start, start + stride, ..."""
    g = torch.Generator().manual_seed(step)
    start, stride = (
        torch.randint(0, 64, (8, 1), generator=g),
        torch.randint(1, 8, (8, 1), generator=g),
    )
    return (start + stride * torch.arange(48)) % 64


if __name__ == "__main__":
    torch.manual_seed(0)
    sage.register()  # makes the name known; changes nothing else
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("sagebwd")

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, 61):
        tokens = batch(step)
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3} loss {loss.item():.4f}")

    print("\nError of INT8 attention in each layer, relative to exact attention:")
    tokens = batch(0)
    print(sagebwd.diagnose(model, dict(input_ids=tokens, labels=tokens)))

    start = torch.tensor([[3, 6, 9, 12, 15, 18]])
    print(
        "\ncontinues",
        start[0].tolist(),
        "with",
        model.generate(start, max_new_tokens=6, do_sample=False)[0, 6:].tolist(),
    )
