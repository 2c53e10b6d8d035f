# SPDX-License-Identifier: Apache-2.0
"""Plain text to tokens and back: bytes, or GPT-2's byte-level BPE from its vocabulary files."""

from pathlib import Path

import numpy as np

from .. import files
from ..errors import BadInput
from ..json_text import loads
from .shards import GPT2_VOCAB, Shard

#: Files of one tokenizer, under the names they are published by.
_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_PIECE = 1 << 20  # characters tokenised at a time
TEXT_LIMIT = 4.0  # gigabytes


class ByteTokenizer:
    """Every byte is a token."""

    vocab = 256
    name = "bytes"

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype("<u2")

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Gpt2Tokenizer:
    """GPT-2's BPE, from ``encoder.json`` and ``vocab.bpe`` (or ``vocab.json`` and
    ``merges.txt``)."""

    vocab = 50257
    name = "gpt2"

    def __init__(self, directory):
        self.files = _find(Path(directory))
        self._made = None

    def _bpe(self):
        if self._made is None:
            try:
                from tokenizers import ByteLevelBPETokenizer
            except ImportError:
                raise BadInput(
                    "tokenizer: GPT-2's BPE needs the Python package `tokenizers`; install it, or "
                    "use --tokenizer bytes"
                ) from None
            try:
                self._made = ByteLevelBPETokenizer(*map(str, self.files))
            except Exception as error:  # the package raises nothing more special
                raise BadInput(f"tokenizer: {self.files[0].parent} is damaged ({error})") from None
        return self._made

    def encode(self, text):
        pieces, at = [], 0
        while at < len(text):
            # Cut where a line begins: merges do not cross it in practice.
            end = text.rfind("\n", at, at + _PIECE) if at + _PIECE < len(text) else len(text)
            end = end if end > at else min(len(text), at + _PIECE)
            pieces.append(text[at:end])
            at = end
        encoded = self._bpe().encode_batch(pieces)
        return np.concatenate([np.asarray(e.ids, "<u2") for e in encoded] or [np.empty(0, "<u2")])

    def decode(self, ids):
        return self._bpe().decode(list(ids), skip_special_tokens=False)

    def byte_table(self):
        """(bytes of all tokens one after the other, offset of each token): what an id stands
        for."""
        symbols = {symbol: byte for byte, symbol in byte_symbols().items()}
        try:
            words = loads(files.read_text(self.files[0]))
            if sorted(words.values()) != list(range(len(words))):
                raise ValueError("its ids are not 0, 1, 2 and so on")
            by_id = [b""] * len(words)
            for word, i in words.items():
                is_mark = word == "<|endoftext|>"  # where a document begins
                by_id[i] = b"\n" if is_mark else bytes(symbols[c] for c in word)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"tokenizer: {self.files[0]} is damaged ({error})") from None
        offsets = np.cumsum([0] + [len(b) for b in by_id])
        return np.frombuffer(b"".join(by_id), np.uint8), offsets


def _find(directory):
    for names in _FILES:
        files = [directory / name for name in names]
        if all(f.is_file() for f in files):
            return files
    expected = " or ".join(" and ".join(names) for names in _FILES)
    raise BadInput(f"tokenizer: {directory} is not a directory with {expected}")


def byte_symbols():
    """The printable character GPT-2's vocabulary writes for each byte: itself where it is
    printable, else the next one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {b: chr(b) for b in printable}
    for b in range(256):
        symbols.setdefault(b, chr(256 + len(symbols) - len(printable)))
    return symbols


def make_tokenizer(name):
    return ByteTokenizer() if name == "bytes" else Gpt2Tokenizer(name)


def read_text(path, tokenizer, limit=TEXT_LIMIT):
    """``limit``: gigabytes. Text is held in memory, as characters and as tokens."""
    raw = files.read_bytes(path, int(limit * 1e9))
    if not raw:
        raise BadInput(f"{path}: the file is empty")
    if b"\0" in raw[:4096]:
        raise BadInput(f"{path}: not text, and not a shard (.bin or .u16.xz)")
    tokens = tokenizer.encode(raw.decode("utf-8", errors="replace"))
    return Shard(str(path), tokens, tokenizer.vocab)


def to_bytes(shard, tokenizer):
    """A shard of GPT-2 tokens as the bytes they stand for."""
    if not isinstance(tokenizer, Gpt2Tokenizer):
        raise BadInput("as_bytes: needs --tokenizer DIR with the vocabulary of the shards")
    if shard.vocab != GPT2_VOCAB:
        raise BadInput(f"as_bytes: {shard.path} has ids of Llama 3, which are not those of GPT-2")
    table, offsets = tokenizer.byte_table()
    top = int(shard.tokens.max())
    if top + 1 >= len(offsets):
        raise BadInput(f"{shard.path}: token {top} is not in the vocabulary of {len(offsets) - 1}")
    pieces = []
    for at in range(0, len(shard.tokens), 1 << 22):  # bounds the memory of the index arrays
        ids = shard.tokens[at : at + (1 << 22)].astype(np.int64)
        starts, sizes = offsets[ids], offsets[ids + 1] - offsets[ids]
        ends = np.cumsum(sizes)
        index = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
        pieces.append(table[index])
    return Shard(shard.path, np.concatenate(pieces).astype("<u2"), ByteTokenizer.vocab)
