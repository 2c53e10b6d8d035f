# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop: one layer learns to copy the token five places back, which only attention
can bring.    python examples/torch_loop.py"""

import torch
import torch.nn.functional as F

import sagebwd


class Copier(torch.nn.Module):
    def __init__(self, vocab=32, heads=4, d=32, length=64):
        super().__init__()
        self.heads, width = heads, heads * d
        self.token = torch.nn.Embedding(vocab, width)
        self.place = torch.nn.Embedding(length, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, tokens):  # [b, s]
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)  # [b, s, h, d]
        return self.head(sagebwd.attention(q, k, v, causal=True).flatten(2))


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Copier().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, 151):
    tokens = torch.randint(0, 32, (16, 64), device=device)
    loss = F.cross_entropy(model(tokens)[:, 5:].flatten(0, 1), tokens[:, :-5].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3} loss {loss.item():.4f}")
