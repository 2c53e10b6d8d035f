# SPDX-License-Identifier: Apache-2.0
"""Records what the attention layers of a live model compute: q, k, v and mask of every call, and
the gradient of its result."""

import json
from dataclasses import dataclass, replace
from typing import Optional
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .. import masks
from .._ops import attention as ops


@dataclass
class Layer:
    """One attention call: tensors as [b, h, n, d], detached. With documents, b is 1 and their
    tokens lie one behind the other."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: Optional[torch.Tensor]  # None: no gradient came back
    scale: Optional[float]
    causal: bool
    top_left: bool
    window: tuple
    unsupported: Optional[str] = None  # why it cannot be compared
    documents: Optional[tuple] = None  # offsets of queries and of keys, lists of ints
    module: str = ""  # the name of the innermost module of the model that made the call

    def pieces(self):
        """Layers without documents: this one, or one for each document that has pairs."""
        if self.documents is None:
            return [self]
        pieces = []
        for i in range(len(self.documents[0]) - 1):
            q, k = (slice(cu[i], cu[i + 1]) for cu in self.documents)
            if q.start < q.stop and k.start < k.stop:
                parts = (self.q[:, :, q], self.k[:, :, k], self.v[:, :, k], self.dout[:, :, q])
                names = ("q", "k", "v", "dout")
                pieces.append(replace(self, documents=None, **dict(zip(names, parts))))
        return pieces


class Capture(TorchFunctionMode):
    """While active, records every call of ``F.scaled_dot_product_attention`` and of this library's
    operator, also inside of ``nn.MultiheadAttention``. The calls themselves run unchanged. With a
    ``model``, layers have the names of its modules."""

    def __init__(self, model=None):
        super().__init__()
        self.layers = []
        self._names = {} if model is None else {m: name for name, m in model.named_modules()}
        self._inside = [""]  # names of the modules that run
        self._hooks = []

    def __enter__(self):
        for module, name in self._names.items():
            enter = lambda *_, name=name: self._inside.append(name)  # returns None: changes nothing
            self._hooks.append(module.register_forward_pre_hook(enter))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        return super().__enter__()

    def _leave(self, *_):
        self._inside.pop()

    def __exit__(self, *error):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        result = func(*args, **kwargs)
        if func is _SDPA:
            self._sdpa(result, *args, **kwargs)
        elif func is ops.FORWARD:
            self._ours(result[0], *args)
        return result

    def _multi_head(self, args, kwargs):
        """PyTorch calls this function as a whole, and a mode does not see the calls inside it. When
        asked for weights, which is the default, it multiplies matrices by hand. We then take the
        same output from a call without weights, and the weights from a second call."""

        def noted(*a, **k):
            out = _SDPA(*a, **k)
            self._sdpa(out, *a, **k)
            return out

        want_weights = kwargs.get("need_weights", True)
        with mock.patch.object(F, "scaled_dot_product_attention", noted):
            out, weights = F.multi_head_attention_forward(
                *args, **{**kwargs, "need_weights": False}
            )
        if want_weights:
            weights = F.multi_head_attention_forward(*args, **kwargs)[1]
        return out, weights

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
        q, k, v = (_batched(t) for t in (query, key, value))
        why = documents = None
        if q.dim() != 4:
            why = f"{q.dim()} dimensions"
        elif not q.shape[0] == k.shape[0] == v.shape[0]:
            why = "q, k and v with batch sizes that differ"
        elif dropout_p:
            why = "dropout (call model.eval() first, or set it to 0)"
        elif attn_mask is not None:
            try:
                documents = masks.read(attn_mask, q, k)
            except NotImplementedError as error:
                why = str(error)
        if documents is None:
            self._note(out, q, k, v, scale, is_causal, True, (-1, -1), why)
        else:
            self._masked(out, q, k, v, scale, documents)

    def _masked(self, out, q, k, v, scale, documents):
        """A call with a mask, as the documents that the mask stands for."""
        mask = (documents.causal, documents.top_left, documents.window)
        if documents.cu_q is None:
            self._note(out, q, k, v, scale, *mask)
            return
        queries = lambda t: documents.pack_q(t).transpose(0, 1)[None]
        keys = lambda t: documents.pack_k(t).transpose(0, 1)[None]
        self._note(
            out,
            *(queries(q), keys(k), keys(v)),
            scale,
            *mask,
            documents=(documents.cu_q.tolist(), documents.cu_k.tolist()),
            part=lambda grad: queries(_batched(grad)),
        )

    def _ours(self, out, q, k, v, *rest):
        options = ops.Options(*rest[: len(ops.Options._fields)])
        cu_q, cu_k, scale = options.cu_seqlens_q, options.cu_seqlens_k, options.softmax_scale
        causal, top_left = options.causal, options.top_left
        left, right = options.window_left, options.window_right
        why = "block lists" if options.list_index is not None else None
        why = "soft capping of logits" if options.softcap else why
        if cu_q is None:
            self._note(out, q, k, v, scale, causal, top_left, (left, right), why)
            return
        documents = (cu_q.tolist(), cu_k.tolist())
        tokens = lambda t, cu: t[: cu[-1]].transpose(0, 1)[None]
        self._note(
            out,
            tokens(q, documents[0]),
            *(tokens(t, documents[1]) for t in (k, v)),
            scale,
            causal,
            top_left,
            (left, right),
            why,
            documents=documents,
            part=lambda grad: tokens(grad, documents[0]),
        )

    def _note(
        self, out, q, k, v, scale, causal, top_left, window, why=None, documents=None, part=None
    ):
        """``part`` takes from the gradient of out what belongs to q."""
        copies = (t.detach().clone() for t in (q, k, v))
        mask = (causal, top_left, window)
        layer = Layer(*copies, None, scale, *mask, why, documents, self._inside[-1])
        self.layers.append(layer)
        if out.requires_grad:

            def keep(grad):
                layer.dout = (part(grad) if part else _batched(grad)).detach().clone()

            out.register_hook(keep)


_SDPA = F.scaled_dot_product_attention


def _batched(t):
    return t.unsqueeze(0) if t.dim() == 3 else t


def save(layers, path):
    """Writes the captures as safetensors for ``sagebwd trace --from``. Each layer has the tensors
    ``layer.<n>.{q,k,v,dout}`` and, in the metadata, ``layer.<n>.attention`` with the mask, the
    scale of the logits and the documents. Layers without a gradient, or that cannot be compared,
    are left out."""
    from safetensors.torch import save_file

    tensors, metadata = {}, {}
    for i, layer in enumerate(layers):
        if layer.dout is None or layer.unsupported:
            continue
        for name in ("q", "k", "v", "dout"):
            tensors[f"layer.{i}.{name}"] = getattr(layer, name).contiguous().cpu()
        metadata[f"layer.{i}.attention"] = json.dumps(_description(layer))
    if not tensors:
        raise ValueError("save: no layer with a gradient that can be compared; nothing was written")
    save_file(tensors, path, metadata)


def _description(layer):
    q, k = layer.q.shape[2], layer.k.shape[2]
    about = {
        "causal": bool(layer.causal),
        "align": "top_left" if layer.top_left else "bottom_right",
        "window": [-1 if side >= max(q, k) else side for side in layer.window],
        "softmax_scale": layer.scale if layer.scale is not None else layer.q.shape[-1] ** -0.5,
    }
    if layer.documents is not None:
        about["cu_seqlens_q"], about["cu_seqlens_k"] = layer.documents
    return about
