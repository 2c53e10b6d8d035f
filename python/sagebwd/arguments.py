# SPDX-License-Identifier: Apache-2.0
"""Checks of plain arguments. A value of the wrong kind raises an error that names what was expected
and what came. Nothing is rounded, truncated or parsed from a string."""

import math
import operator

import torch

_SMALLEST, _LARGEST = 2.0**-149, torch.finfo(torch.float32).max  # of float32, other than 0


def _refuse(name, expected, value):
    raise TypeError(f"{name}: expected {expected}, got {type(value).__name__} {value!r}")


def integer(name, value, low, high, expected):
    """value as an int from low to high. Bools and floats are refused, even 3.0."""
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected {expected}, got a tensor (.item() gives its value)")
    if isinstance(value, bool):
        _refuse(name, expected, value)
    if not isinstance(value, (int, torch.SymInt)):
        try:
            value = operator.index(value)  # integers of NumPy
        except TypeError:
            _refuse(name, expected, value)
    if value < low or value > high:
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return value


def flag(name, value):
    """value as a bool. 0 and 1 are accepted; "False" and 2 are not."""
    if isinstance(value, (bool, torch.SymBool)):
        return value
    if type(value) is int and value in (0, 1):
        return bool(value)
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    return _refuse(name, "True or False", value)


def scale(name, value):
    """A softmax scale as a float, or None for the default."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise NotImplementedError(
                f"{name}: expected a number, got a tensor that requires grad, to which no gradient "
                f"would flow; multiply q by it and pass {name}=1.0"
            )
        if value.numel() != 1:
            raise ValueError(f"{name}: expected one number, got shape {tuple(value.shape)}")
        value = value.item()
    if isinstance(value, (bool, str, bytes, complex)):
        _refuse(name, "a number", value)
    if not isinstance(value, (float, torch.SymFloat)):
        try:
            value = float(value)
        except (TypeError, ValueError):
            _refuse(name, "a number", value)
    # The comparison is written so that NaN is refused too. A value that float32 rounds to 0 would
    # mean "the default" to the library.
    if not _SMALLEST <= abs(value) <= _LARGEST:
        raise ValueError(
            f"{name}: expected a finite number other than 0 within float32, got {value}"
        )
    return value


def softcap(value):
    """A soft cap of logits as a float; 0 for none."""
    if value is None or (type(value) in (int, float) and value == 0):
        return 0.0
    value = scale("softcap", value)
    if not _LEAST_CAP <= value <= _MOST_CAP:
        raise ValueError(f"softcap: expected 0 (off) or a number from 2^-64 to 2^64, got {value}")
    return value


_LEAST_CAP, _MOST_CAP = 2.0**-64, 2.0**64  # where the kernels can compute with it in float32


def window(name, value):
    """(left, right) of a sliding window; -1 for a side that is open."""
    try:
        left, right = value
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: expected a pair (left, right) of ints, -1 for an open side, got {value!r}"
        ) from None
    return _side(name, left), _side(name, right)


def _side(name, value):
    if type(value) is int and -1 <= value <= _FAR:
        return value  # most calls
    if value is None:
        return -1
    side = integer(name, value, -1, math.inf, "-1 (open) or more on either side")
    return min(side, _FAR)


_FAR = 2**62  # no sequence is longer: more than the operators could take means the same
