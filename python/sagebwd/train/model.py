# SPDX-License-Identifier: Apache-2.0
"""A Llama: RMSNorm, rotary positions, SwiGLU, tied embeddings; optionally grouped queries and
QK-norm.

Shapes: b sequences, s tokens, c width, h heads, d head dim.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .attend import Clock, make_attend
from .errors import BadInput
from .head import head_loss, slice_loss
from .machine import memory

EPS = 1e-5  # of RMSNorm


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.gain.shape, self.gain.to(x.dtype), EPS)


class Attention(nn.Module):
    def __init__(self, config, layer, clock):
        super().__init__()
        self.d = config.head_dim
        self.sizes = [
            config.heads,
            config.kv_heads or config.heads,
            config.kv_heads or config.heads,
        ]
        self.qkv = nn.Linear(config.width, sum(self.sizes) * self.d, bias=False)
        self.out = nn.Linear(config.heads * self.d, config.width, bias=False)
        self.q_norm = RMSNorm(self.d) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.d) if config.qk_norm else nn.Identity()
        self.attend = make_attend(config, layer, clock)
        self.tap = None  # an instrument: called with q, k, v and the result

    def forward(self, x, cos, sin):
        heads = self.qkv(x).unflatten(-1, (-1, self.d))
        q, k, v = heads.split(self.sizes, 2)  # [b, s, h, d]
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = self.attend(q, k, v)
        if self.tap is not None:
            self.tap(q, k, v, y)
        return self.out(y.flatten(2))

    def row_slices(self):
        """Rows of ``qkv.weight`` that make q, k and v."""
        q, k, v = (n * self.d for n in self.sizes)
        return {"Wq": slice(0, q), "Wk": slice(q, q + k), "Wv": slice(q + k, q + k + v)}


def rotate(x, cos, sin):
    """Rotary positions: x [b, s, h, d], cos and sin [s, d/2] in float32. The result has x's
    dtype."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config, layer, clock):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.width), Attention(config, layer, clock)
        self.ffn_norm, self.ffn = RMSNorm(config.width), FeedForward(config)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config, vocab):
        super().__init__()
        self.config, self.vocab = config, vocab
        self.clock = Clock()
        padded = _padded(vocab)
        self.embedding = nn.Embedding(padded, config.width)
        self.blocks = nn.ModuleList(Block(config, i, self.clock) for i in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = None if config.tied else nn.Linear(config.width, padded, bias=False)
        self.slice_loss = slice_loss
        # Not buffers: DDP would send them around, and context parallel resizes them.
        self.cos, self.sin = rope_tables(config)

    def init_weights(self, seed):
        """Normal weights of deviation 0.02; those that write to the residual stream are smaller,
        by depth. They come from a generator on the CPU, so they are the same on every device."""
        g = torch.Generator().manual_seed(seed)
        deep = (2 * self.config.layers) ** -0.5
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() < 2:
                    p.fill_(1.0)
                    continue
                std = 0.02 * (deep if name.endswith(("attention.out.weight", "down.weight")) else 1)
                p.copy_(torch.randn(p.shape, generator=g) * std)

    def forward(self, tokens, targets=None):
        """Mean loss of targets [b, s], or without them the logits [b, s, vocab] of tokens."""
        s = tokens.shape[1]
        cos, sin = self.cos[:s], self.sin[:s]
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.config.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        x = self.norm(x)
        weight = self.embedding.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(x, weight)[..., : self.vocab]
        return head_loss(x.flatten(0, 1), weight, targets.flatten(), self.slice_loss)

    def set_attention(self, config):
        """Gives every layer the attention that ``config`` describes."""
        for i, block in enumerate(self.blocks):
            block.attention.attend = make_attend(config, i, self.clock)

    def compile_blocks(self, backend):
        # All blocks of all models of a process share one cache; PyTorch gives up at 8 entries.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for block in self.blocks:
            block.compile(backend=backend)
        self.slice_loss = torch.compile(slice_loss, backend=backend)


def rope_tables(config):
    d = config.head_dim
    frequency = config.rope_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(config.context, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def parameter_count(config, vocab):
    """Of the model that ``build`` makes, without making it."""
    c, d = config, config.head_dim
    attention = c.width * d * (2 * c.heads + 2 * (c.kv_heads or c.heads))
    norms = 2 * c.width + (2 * d if c.qk_norm else 0)
    embedding = _padded(vocab) * c.width * (1 if c.tied else 2)
    return embedding + c.layers * (attention + 3 * c.width * c.ffn + norms) + c.width


def _padded(vocab):
    """A round number of columns: matmuls are faster."""
    return -(-vocab // 64) * 64


def build(config, vocab, device):
    """The model with its initial weights on the device. Compiling and sharding come after."""
    need = 4 * (parameter_count(config, vocab) + config.context * config.head_dim)
    if need > memory():
        raise BadInput(
            f"model: {config.layers} layers of width {config.width}, with {vocab} token ids and "
            f"context {config.context}, take {need / 1e9:.1f} GB; this machine has "
            f"{memory() / 1e9:.1f} GB"
        )
    model = Llama(config, vocab)
    model.init_weights(config.seed)
    model.cos, model.sin = model.cos.to(device), model.sin.to(device)
    return model.to(device)
