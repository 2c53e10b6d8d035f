# SPDX-License-Identifier: Apache-2.0
"""The key that :mod:`.axolotl` adds to axolotl's configuration."""

from pydantic import BaseModel


class SageArguments(BaseModel):
    """``sagebwd``: keyword arguments of ``integrations.transformers.register``."""

    sagebwd: dict | None = None
