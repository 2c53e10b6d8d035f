# SPDX-License-Identifier: Apache-2.0
"""INT8 attention in a PyTorch training loop: one layer learns to copy, exact and INT8 attention
side by side.

Run it with: python examples/01_torch.py
"""

import torch
import torch.nn.functional as F

import sagebwd


class Copier(torch.nn.Module):
    """Predicts the token seen `shift` places ago: only attention can bring it here."""

    def __init__(self, attend, vocab=32, heads=4, d=32, length=64):
        super().__init__()
        width = heads * d
        self.attend, self.heads, self.d = attend, heads, d
        self.token = torch.nn.Embedding(vocab, width)
        self.place = torch.nn.Embedding(length, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, tokens):  # [b, s]
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        q, k, v = (
            self.qkv(x).view(*x.shape[:2], 3, self.heads, self.d).unbind(2)
        )  # [b, s, h, d], read in place
        return self.head(self.attend(q, k, v).flatten(2))


def exact(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def int8(q, k, v):
    return sagebwd.attention(q, k, v, causal=True)


def train(attend, steps=150, shift=5):
    torch.manual_seed(0)
    model = Copier(attend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 32, (16, 64))
        logits = model(tokens)[:, shift:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :-shift].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    q = torch.randn(1, 128, 4, 64)
    print("supported here:", sagebwd.is_supported(q, q, q))
    print("and this:      ", sagebwd.is_supported(q.double(), q.double(), q.double()))
    print(f"{'step':>5} {'exact':>8} {'int8':>8}")
    for step, (a, b) in enumerate(zip(train(exact), train(int8)), 1):
        if step == 1 or step % 25 == 0:
            print(f"{step:5} {a:8.4f} {b:8.4f}")
