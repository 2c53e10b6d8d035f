# SPDX-License-Identifier: Apache-2.0
"""The version of the Python package: that of the public header, and, where SAGEBWD_WHEEL_LABEL is
set, a label after it ("+cu130"), so that wheels of different builds can lie side by side."""

import os
import re
from pathlib import Path

_HEADER = Path(__file__).parents[2] / "include" / "sagebwd" / "version.h"


def dynamic_metadata(field, settings=None):
    if field != "version":
        raise ValueError(f"only the version is dynamic, not {field!r}")
    version = re.search(r'SAGEBWD_VERSION_STRING "([^"]+)"', _HEADER.read_text()).group(1)
    label = os.environ.get("SAGEBWD_WHEEL_LABEL")
    return f"{version}+{label}" if label else version
