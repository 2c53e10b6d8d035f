# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files: an 8-byte length, a JSON header, raw bytes. Written here rather
than by the library of that name, so that one pass writes and hashes, an error of the disk is an
OSError, and a file that is read is checked in every offset."""

import hashlib
import json
import math
import os

import torch

from .errors import BadInput

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000


def write_tensors(path, tensors):
    """Writes CPU tensors by name, flushed to the disk. Returns the file's SHA-256."""
    header, at = {}, 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape)}
        header[name]["data_offsets"] = [at, at + size]
        at += size
    head = json.dumps(header).encode()
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


def read_tensors(path):
    """The tensors of a file by name. Raises BadInput unless its header fits its bytes exactly."""
    with open(path, "rb") as file:
        raw = bytearray(file.read())
    try:
        return _parse(raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: not a sound safetensors file ({error})") from None


def _parse(raw):
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(_LONGEST_HEADER, len(raw) - 8):
        raise ValueError("the header is longer than the file")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    body = torch.frombuffer(raw, dtype=torch.uint8)[8 + length :] if len(raw) > 8 + length else None
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]]
        begin, stop = entry["data_offsets"]
        size = math.prod(shape) * dtype.itemsize
        if (
            begin != end
            or stop > len(raw) - 8 - length
            or stop != begin + size
            or min(shape, default=0) < 0
        ):
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
