# SPDX-License-Identifier: Apache-2.0
"""Text from a model: plain sampling, the whole context again for every token."""

import torch


@torch.no_grad()
def sample(model, tokenizer, prompt, tokens, autocast, seed=0, temperature=0.8):
    """``prompt`` and the model's continuation."""
    device = model.cos.device
    prompt = prompt or "\n"
    ids = torch.from_numpy(tokenizer.encode(prompt).astype("int64")).to(device)[None]
    if ids.shape[1] == 0 or int(ids.max()) >= model.vocab:
        return "(the prompt is not in the model's vocabulary)"
    g = torch.Generator(device).manual_seed(seed)
    for _ in range(tokens):
        with autocast():
            logits = model(ids[:, -model.config.context :])[:, -1].float()
        share = torch.softmax(logits / temperature, -1)
        ids = torch.cat((ids, torch.multinomial(share, 1, generator=g)), 1)
    return tokenizer.decode(ids[0].tolist())
