# SPDX-License-Identifier: Apache-2.0
"""sagebwd: INT8 attention, forward **and** backward, for training.

    import sagebwd
    out = sagebwd.attention(q, k, v, causal=True)          # q [b, s, h, d]
    out = sagebwd.flash_attn_func(q, k, v, causal=True)    # or a name your code already calls

Six of the seven matmuls of an attention layer run in INT8. ``recipe=`` says how they are quantised,
and ``backward="bf16"`` takes the backward out of INT8. ``sagebwd.is_supported(q, k, v)`` says
beforehand whether a call will run and, if not, why.

Importing this package registers operators with PyTorch, and their operation counts
(``FlopCounterMode``). It starts no device, patches nothing and imports no framework. The hooks into
frameworks are in ``sagebwd.integrations`` and act only when called.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import wait_policy as _wait_policy

_wait_policy.settle()

from . import _library  # noqa: E402

_library.load()

from ._ops import flops  # noqa: E402
from .attention import Support, attention, attention_varlen, is_supported  # noqa: E402
from .block_lists import BlockLists  # noqa: E402
from .drop_ins import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    sageattn,
    sageattn_varlen,
    scaled_dot_product_attention,
)
from .kv_cache import flash_attn_with_kvcache  # noqa: E402
from .linear import linear_attention  # noqa: E402
from .recipe import Recipe  # noqa: E402

if _TYPE_CHECKING:
    from . import integrations, sla2
    from .tools.diagnosis import diagnose
    from .tools.leakage import leaks

flops.register()

__version__: str = _library.version()

__all__ = [
    "BlockLists",
    "Recipe",
    "Support",
    "attention",
    "attention_varlen",
    "diagnose",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "integrations",
    "is_supported",
    "leaks",
    "linear_attention",
    "sageattn",
    "sageattn_varlen",
    "scaled_dot_product_attention",
    "sla2",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> _Any:
    # Loaded on first use: none of them is needed to compute attention.
    if name == "diagnose":
        return _import_module(".tools.diagnosis", __name__).diagnose
    if name == "leaks":
        return _import_module(".tools.leakage", __name__).leaks
    if name in ("integrations", "sla2"):
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
