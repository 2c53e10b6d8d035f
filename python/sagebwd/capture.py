# SPDX-License-Identifier: Apache-2.0
"""Records what the attention layers of a live model compute: q, k, v of every call and the gradient
of its result."""

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


@dataclass
class Layer:
    """One attention call: tensors as [b, h, n, d], detached."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: Optional[torch.Tensor]  # None: no gradient came back
    scale: Optional[float]
    causal: bool
    top_left: bool
    window: tuple
    unsupported: Optional[str] = None  # why it cannot be compared


class Capture(TorchFunctionMode):
    """While active, notes every call of ``F.scaled_dot_product_attention`` and of this library's
    operator. The calls themselves run as they would."""

    def __init__(self):
        super().__init__()
        self.layers = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self._sdpa(result, *args, **(kwargs or {}))
        elif func is torch.ops.sagebwd.fwd.default:
            self._ours(result[0], *args)
        return result

    def _sdpa(
        self,
        out,
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        q, k, v = (t if t.dim() == 4 else t.unsqueeze(0) for t in (query, key, value))
        why = "an attention mask" if attn_mask is not None else "dropout" if dropout_p else None
        if q.dim() != 4:
            why = f"{q.dim()} dimensions"
        self._note(out, q, k, v, scale, is_causal, True, (-1, -1), why)

    def _ours(
        self, out, q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, top_left, left, right, *rest
    ):
        why = "a packed batch" if cu_q is not None else None
        self._note(out, q, k, v, scale, causal, top_left, (left, right), why)

    def _note(self, out, q, k, v, scale, causal, top_left, window, why):
        copies = (t.detach().clone() for t in (q, k, v))
        layer = Layer(*copies, None, scale, causal, top_left, window, why)
        self.layers.append(layer)
        if out.requires_grad:

            def keep(grad):
                layer.dout = (grad if grad.dim() == 4 else grad.unsqueeze(0)).detach().clone()

            out.register_hook(keep)


def save(layers, path):
    """Writes the captures as safetensors, one set ``layer.<n>.{q,k,v,dout}`` per layer, for
    ``sagebwd trace``."""
    from safetensors.torch import save_file

    tensors = {}
    for i, layer in enumerate(layers):
        if layer.dout is None:
            continue
        for name in ("q", "k", "v", "dout"):
            tensors[f"layer.{i}.{name}"] = getattr(layer, name).contiguous().cpu()
    save_file(tensors, path)
