# SPDX-License-Identifier: Apache-2.0
"""Real text as tokens: a file, or what every machine with Python has, the sources of its standard
library. The end is held out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..train.data import Batches, evaluation_windows
from ..train.data.stdlib import read_stdlib
from ..train.data.text import read_text
from ..train.errors import BadInput

#: Share of the tokens held out.
_HELD_OUT = 0.1
_PIECE = 1 << 16  # characters: pieces are tokenised in parallel


@dataclass
class Text:
    train: np.ndarray
    held_out: np.ndarray
    words: str

    def sequences(self, count, tokens, device):
        """The first of the training part, [count, tokens + 1]."""
        self._check(self.train, count * tokens + 1)
        rows = [self.train[i * tokens : (i + 1) * tokens + 1] for i in range(count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)

    def batches(self, context, seed, device):
        """Training sequences in the order of a seed."""
        self._check(self.train, context + 1)
        return Batches([self.train], context, seed, device)

    def evaluation(self, tokens, context, device):
        """Held-out sequences, always the same."""
        self._check(self.held_out, context + 1)
        batches = Batches([self.held_out], context, 0, device)
        return batches.windows(evaluation_windows(batches, tokens, 1))

    def _check(self, part, need):
        if len(part) < need:
            raise BadInput(f"text: {need} tokens are needed, {len(part)} are there; {self.words}")


def open_text(path, tokenizer):
    """``path``: a text file, or None."""
    adapter = _Tokenizer(tokenizer)
    if path is None:
        shard = read_stdlib(adapter)
    else:
        try:
            shard = read_text(Path(path).expanduser(), adapter)
        except OSError as error:
            raise BadInput(f"text: {path} cannot be read ({error.strerror or error})") from None
    cut = len(shard.tokens) - int(_HELD_OUT * len(shard.tokens))
    words = f"{shard.path}: {cut} tokens, and {len(shard.tokens) - cut} held out"
    return Text(shard.tokens[:cut], shard.tokens[cut:], words)


class _Tokenizer:
    """A tokenizer of transformers, as the trainer's readers take one."""

    def __init__(self, tokenizer):
        self._tokenizer, self.vocab = tokenizer, len(tokenizer)

    def encode(self, text):
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        ids = self._tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        return np.concatenate([np.asarray(i, "<u4") for i in ids])
