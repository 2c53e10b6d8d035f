# SPDX-License-Identifier: Apache-2.0
"""Files of token ids: llm.c and nanoGPT ``.bin``, and ``.u16.xz``. Read as numbers, never executed.

llm.c: 256 int32 (magic, version, number of tokens, zeros), then the tokens: uint16 for magic
20240520 (GPT-2), uint32 for 20240801 (Llama 3). nanoGPT: uint16 without a header. ``.u16.xz``:
uint16, compressed.
"""

import lzma
from dataclasses import dataclass

import numpy as np

from ..errors import BadInput
from ..files import check_regular

GPT2_VOCAB, LLAMA3_VOCAB = 50257, 128256
_HEADER = 1024  # bytes
_LLM_C = {20240520: (1, "<u2", GPT2_VOCAB), 20240801: (7, "<u4", LLAMA3_VOCAB)}


@dataclass
class Shard:
    path: str
    tokens: np.ndarray  # uint16 or uint32; may be a memory map
    vocab: int  # ids its format speaks of


def is_shard(path):
    return path.suffix == ".bin" or path.name.endswith(".u16.xz")


def read_shard(path, unpack_limit):
    """``unpack_limit``: gigabytes that a compressed file may hold."""
    check_regular(path, path)
    size = path.stat().st_size
    if size == 0:
        raise BadInput(f"{path}: the file is empty")
    shard = _read_xz(path, unpack_limit) if path.name.endswith(".xz") else _read_bin(path, size)
    if len(shard.tokens) == 0:
        raise BadInput(f"{path}: the file holds no tokens")
    return shard


def _read_xz(path, limit):
    """Unpacks in pieces, because a few kilobytes can unpack to more than any memory holds."""
    raw = bytearray()
    try:
        with lzma.open(path) as file:
            while piece := file.read(1 << 24):
                raw += piece
                if len(raw) > limit * 1e9:
                    raise BadInput(
                        f"{path}: unpacks to more than {limit:g} GB; if that is what it should "
                        "hold, raise --unpack-limit"
                    )
    except (lzma.LZMAError, EOFError) as error:
        raise BadInput(f"{path}: not a complete .xz file ({error})") from None
    if len(raw) % 2:
        raise BadInput(f"{path}: expected 2 bytes a token, got {len(raw)} bytes")
    return Shard(str(path), np.frombuffer(raw, "<u2"), GPT2_VOCAB)


def _read_bin(path, size):
    with open(path, "rb") as file:
        head = np.frombuffer(file.read(min(_HEADER, size) // 4 * 4), "<i4")
    if len(head) == 0 or int(head[0]) not in _LLM_C:
        if size % 2:
            raise BadInput(
                f"{path}: neither an llm.c shard (no magic number) nor nanoGPT's uint16 tokens "
                f"({size} bytes is odd)"
            )
        tokens = _map(path, "<u2", 0, size // 2)
        if _is_uint32(tokens):
            raise BadInput(
                f"{path}: looks like 32-bit token ids without a header; nanoGPT's files have "
                "16-bit ids, and 32-bit ids need the header of llm.c (magic 20240801, Llama 3)"
            )
        return Shard(str(path), tokens, GPT2_VOCAB)
    version, dtype, vocab = _LLM_C[int(head[0])]
    if size < _HEADER:
        raise BadInput(f"{path}: an llm.c shard whose header is cut off at {size} bytes")
    if int(head[1]) != version:
        raise BadInput(f"{path}: expected llm.c version {version}, got {int(head[1])}")
    count, width = int(head[2]), np.dtype(dtype).itemsize
    there = (size - _HEADER) / width
    if count < 0 or count != there:
        raise BadInput(f"{path}: the header announces {count} tokens, the file holds {there:g}")
    return Shard(str(path), _map(path, dtype, _HEADER, count), vocab)


def _is_uint32(tokens):
    """Every second number is the upper half of an id, which is 0 or 1 for less than 131072 ids."""
    start = tokens[:4096]
    return len(start) >= 64 and (start[1::2] <= 1).all() and (start[::2] > 1).any()


def _map(path, dtype, offset, count):
    if count == 0:
        return np.empty(0, dtype)
    # "c": private pages, because PyTorch does not like read-only arrays. Nothing writes to them.
    return np.memmap(path, dtype, "c", offset, (count,))
