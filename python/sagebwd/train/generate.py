# SPDX-License-Identifier: Apache-2.0
"""Text from a model by plain sampling. The whole context is computed again for every token."""

import math

import torch

from .errors import BadInput


def encode_prompt(tokenizer, prompt, vocab):
    """Ids of the prompt (of a line break, where there is none). Raises BadInput."""
    if tokenizer is None:
        raise BadInput(
            "tokenizer: the run was trained on token ids, and what they stand for is not known; "
            "give --tokenizer DIR with encoder.json and vocab.bpe, if they are GPT-2's"
        )
    ids = torch.from_numpy(tokenizer.encode(prompt or "\n").astype("int64"))
    if int(ids.max()) >= vocab:
        raise BadInput(
            f"prompt: token {int(ids.max())} is beyond the model's vocabulary of {vocab}"
        )
    return ids


@torch.no_grad()
def sample(model, tokenizer, prompt, tokens, autocast, seed=0, temperature=0.8, top_k=0):
    """``prompt`` and the model's continuation. ``temperature`` 0: always the likeliest token.
    ``top_k``: chosen among so many, 0: among all."""
    device = model.cos.device
    ids = encode_prompt(tokenizer, prompt, model.vocab).to(device)[None]
    g = torch.Generator(device).manual_seed(seed)
    for _ in range(tokens):
        with autocast():
            logits = model(ids[:, -model.config.context :])[:, -1].float()
        ids = torch.cat((ids, _choose(logits, temperature, top_k, g)), 1)
    return tokenizer.decode(ids[0].tolist())


def _choose(logits, temperature, top_k, generator):
    if not torch.isfinite(logits).all():
        raise BadInput("the model's logits are not finite; its training has gone wrong")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    # Subtract the largest first, so that no temperature, however small, overflows.
    share = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
    return torch.multinomial(share, 1, generator=generator)
