# SPDX-License-Identifier: Apache-2.0
"""Opens the data of a run: finds the files, reads and checks them, splits off what is held out."""

import errno
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import BadInput
from ..files import check_regular
from .shards import is_shard, read_shard
from .stdlib import read_stdlib
from .text import make_tokenizer, read_text, to_bytes

#: Share of the data held out when no other held-out data is there.
_HELD_OUT = 0.05
#: Vocabularies as they are called in the names of files.
_VOCABULARIES = re.compile(r"gpt[-_]?[24]|llama[-_]?[234]|mistral|qwen|gemma|phi[-_]?3")


@dataclass
class Source:
    train: list  # arrays of token ids, one per shard
    val: list
    vocab: int
    tokenizer: object  # None: unknown
    words: str  # what it is, for people
    fingerprint: str  # same data, same text


def open_data(config):
    """The data that ``config`` names, checked. Raises BadInput."""
    tokenizer = make_tokenizer(config.tokenizer)
    train_paths, val_paths = _find(config)
    read = lambda path: _read(path, config, tokenizer)
    train = [read(path) for path in train_paths] if train_paths else [read_stdlib(tokenizer)]
    val = [read(path) for path in val_paths]
    _check_one_vocabulary(train + val)
    vocab = config.vocab or max(s.vocab for s in train + val)
    for shard in train + val:
        _check_ids(shard, vocab)
    if config.as_bytes or train[0].vocab == 256:
        tokenizer = make_tokenizer("bytes")
    elif train[0].vocab != tokenizer.vocab:
        tokenizer = None  # shards, and nobody said what their ids stand for
    train, val = [s.tokens for s in train], [s.tokens for s in val]
    if not val:
        train, val = _split(train, config)
    _check_lengths(train, val, config)
    names = ", ".join(p.name for p in train_paths) if train_paths else "Python's standard library"
    words = (
        f"{names}: {sum(map(len, train)) / 1e6:.2f}M tokens, "
        f"{sum(map(len, val)) / 1e6:.2f}M held out, vocabulary {vocab}"
    )
    return Source(train, val, vocab, tokenizer, words, _fingerprint(train, val))


def _find(config):
    train = [path for part in _parts(config.data, "data") for path in _expand(part, "data")]
    val = [path for part in _parts(config.val, "val") for path in _expand(part, "val")]
    if train and not val:
        held_out = [p for p in train if "val" in p.name]
        if held_out and len(held_out) < len(train):
            train, val = [p for p in train if "val" not in p.name], held_out
    return train, val


def _parts(text, name):
    parts = [Path(part.strip()).expanduser() for part in text.split(",") if part.strip()]
    if text and not parts:
        raise BadInput(f"{name}: expected files or directories, with commas between, got {text!r}")
    return parts


def _expand(path, name):
    try:
        if not path.is_dir():
            check_regular(path, path)
            return [path]
        inside = sorted(path.iterdir())
    except FileNotFoundError:
        raise BadInput(f"{name}: {path} does not exist") from None
    except OSError as error:
        raise BadInput(f"{name}: {path} cannot be read ({error.strerror or error})") from None
    found = [p for p in inside if is_shard(p)] or [p for p in inside if p.suffix == ".txt"]
    if not found:
        raise BadInput(f"{name}: {path} holds no .bin, .u16.xz or .txt files")
    return found


def _read(path, config, tokenizer):
    try:
        if not is_shard(path):
            tokenizer = make_tokenizer("bytes") if config.as_bytes else tokenizer
            return read_text(path, tokenizer, config.unpack_limit)
        shard = read_shard(path, config.unpack_limit)
    except OSError as error:
        more = "; if that is right, raise --unpack-limit" if error.errno == errno.EFBIG else ""
        raise BadInput(f"{path}: cannot be read ({error.strerror or error}){more}") from None
    return to_bytes(shard, tokenizer) if config.as_bytes else shard


def _check_one_vocabulary(shards):
    """The same id stands for different text in different vocabularies, and nothing would say so.
    A format tells them apart; where it does not, the files' names may."""
    for kind in (lambda s: f"{s.vocab} ids", _named_vocabulary):
        found = {}
        for shard in shards:
            found.setdefault(kind(shard), shard.path)
        found.pop("", None)
        if len(found) > 1:
            (one, here), (other, there), *_ = found.items()
            raise BadInput(
                f"data: {here} has tokens of one vocabulary ({one}), {there} of another ({other}); "
                "a model can read one of them: give files of one kind as --data and --val"
            )


def _named_vocabulary(shard):
    path = Path(shard.path)
    named = _VOCABULARIES.search(path.name.lower()) if is_shard(path) else None
    return re.sub(r"[-_ ]", "", named[0]) if named else ""


def _check_ids(shard, vocab):
    # Compare in pieces, because a comparison over a whole memory map would copy it.
    for at in range(0, len(shard.tokens), 1 << 24):
        piece = shard.tokens[at : at + (1 << 24)]
        if piece.max() >= vocab:
            index = at + int(piece.argmax())
            raise BadInput(
                f"{shard.path}: token {index} has id {int(shard.tokens[index])}, but the "
                f"vocabulary has {vocab} ids; the file is damaged, or --vocab is too small"
            )


def _split(train, config):
    last = train[-1]
    cut = len(last) - max(config.context + 1, int(_HELD_OUT * len(last)))
    return [*train[:-1], last[: max(cut, 0)]], [last[max(cut, 0) :]]


def _check_lengths(train, val, config):
    need = config.context + 1
    for name, shards in (("data", train), ("held-out data", val)):
        if not any(len(s) >= need for s in shards):
            raise BadInput(
                f"{name}: a sequence takes {need} tokens (context + 1), the longest piece has "
                f"{max(map(len, shards), default=0)}"
            )


def _fingerprint(train, val):
    """Lengths, and a few thousand tokens of every shard."""
    digest = hashlib.sha256()
    for shard in train + val:
        sample = shard[:: max(1, len(shard) // 4096)]
        digest.update(f"{len(shard)}:".encode() + np.ascontiguousarray(sample, "<u4").tobytes())
    return digest.hexdigest()[:16]
