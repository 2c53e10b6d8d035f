# SPDX-License-Identifier: Apache-2.0
"""JSON that every parser takes. A float that is not finite is written as the string "NaN",
"Infinity" or "-Infinity": the bare words of Python's json module are not JSON."""

import json
import math

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value, indent=None, sort_keys=False):
    return json.dumps(_strict(value), indent=indent, sort_keys=sort_keys, allow_nan=False)


def _strict(value):
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    return [_strict(v) for v in value] if isinstance(value, (list, tuple)) else value


def loads(text):
    """Raises ValueError and nothing else, for text that is nested too deeply as well."""
    return _loads(text, None)


def load_figures(text):
    """The same for logs and summaries: the three words become floats again."""
    return _loads(text, _numbers)


def _loads(text, hook):
    try:
        return json.loads(text, object_hook=hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _numbers(entry):
    return {k: _WORDS.get(v, v) if isinstance(v, str) else v for k, v in entry.items()}
