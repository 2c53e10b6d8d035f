# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files: an 8-byte length, a JSON header, raw bytes. We do not use the
library of that name, so that one pass writes and hashes, an error of the disk is an OSError, and
every offset is checked when a file is read."""

import hashlib
import math
import os

import torch

from .errors import BadInput
from .files import check_regular
from .json_text import dumps, loads
from .machine import memory

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000
#: What parsing a file that is not sound may raise.
_UNSOUND = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)


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
    raw = _read(path)
    if sha256 is not None and hashlib.sha256(raw).hexdigest() != sha256:
        raise BadInput(f"{path}: damaged, its checksum differs from the one in state.json")
    try:
        return _parse(raw)
    except _UNSOUND as error:
        raise BadInput(f"{path}: not a sound safetensors file ({error})") from None
    except MemoryError:
        raise _too_large(path, len(raw)) from None


def read_metadata(path):
    """The words that ``write_tensors`` was given; only the header is read."""
    with open(path, "rb") as file:
        check_regular(file.fileno(), path)
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LONGEST_HEADER, os.fstat(file.fileno()).st_size):
            raise BadInput(f"{path}: the header is longer than the file")
        head = file.read(length)
    try:
        return dict(loads(head).get("__metadata__") or {})
    except _UNSOUND as error:
        raise BadInput(f"{path}: not a sound safetensors file ({error})") from None


def _read(path):
    """All bytes, as something that tensors can be made of."""
    check_regular(path, path)  # before it is opened: a pipe would wait for a writer
    size = os.path.getsize(path)
    if size > memory():
        raise _too_large(path, size)
    try:
        raw = bytearray(size)
    except MemoryError:
        raise _too_large(path, size) from None
    with open(path, "rb") as file:
        got = file.readinto(raw)
    del raw[got:]
    return raw


def _too_large(path, size):
    return BadInput(
        f"{path}: {size / 1e9:.1f} GB do not fit into the memory of this machine "
        f"({memory() / 1e9:.1f} GB)"
    )


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
