# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files: an 8-byte length, a JSON header, raw bytes. We do not use the
library of that name, so that one pass writes and hashes, an error of the disk is an OSError, and
every offset is checked when a file is read."""

import hashlib
import math
import os

import torch

from .errors import BadInput
from .json_text import dumps, loads

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000


def write_tensors(path, tensors, metadata=None):
    """Writes CPU tensors by name, flushed to the disk. Returns the file's SHA-256."""
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape)}
        header[name]["data_offsets"] = [at, at + size]
        at += size
    head = dumps(header).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def put(data):
            digest.update(data)
            file.write(data)

        put(len(head).to_bytes(8, "little") + head)
        for t in tensors.values():
            put(_bytes_of(t))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes_of(t):
    flat = t.detach().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy()) if t.numel() else b""


def read_tensors(path, sha256=None):
    """The tensors of a file by name. Raises BadInput unless its bytes have the checksum, where one
    is given, and its header fits them exactly."""
    raw = bytearray(os.path.getsize(path))
    with open(path, "rb") as file:
        complete = file.readinto(raw) == len(raw)
    if sha256 is not None and (not complete or hashlib.sha256(raw).hexdigest() != sha256):
        raise BadInput(f"{path}: damaged, its checksum differs from the one in state.json")
    try:
        return _parse(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise BadInput(f"{path}: not a sound safetensors file ({error})") from None


def _parse(raw):
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(_LONGEST_HEADER, len(raw) - 8):
        raise ValueError("the header is longer than the file")
    header = loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    body = torch.frombuffer(raw, dtype=torch.uint8)[8 + length :] if len(raw) > 8 + length else None
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        begin, stop = entry["data_offsets"]
        # Whole numbers only: int() would make 2 of 2.9.
        if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, stop)):
            raise ValueError(f"{name} has shape {shape} and offsets {begin}, {stop}")
        size = math.prod(shape) * dtype.itemsize
        if begin != end or stop > len(raw) - 8 - length or stop != begin + size:
            raise ValueError(f"{name} has wrong offsets")
        if size == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
        else:
            # A copy: slices of the file need not be aligned to the element size.
            tensors[name] = body[begin:stop].clone().view(dtype).reshape(shape)
        end = stop
    if end != len(raw) - 8 - length:
        raise ValueError("the file's length does not fit its header")
    return tensors
