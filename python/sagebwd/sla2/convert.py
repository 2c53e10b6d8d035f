# SPDX-License-Identifier: Apache-2.0
"""Puts sparse-linear attention into a model."""

from fnmatch import fnmatchcase

import torch

from . import language, saving
from .attention import Attention
from .language import is_language_attention
from .token_order import RASTER, TokenOrder
from .wan import Processor, is_wan_attention


def convert(model, keep=0.05, where="*", *, order="raster", box=(4, 4, 4), **options):
    """Puts :class:`sagebwd.sla2.Attention` into the self-attention of a Wan-like video transformer
    of diffusers, or, causal, into that of a Llama-like language model of transformers. Returns the
    names of the layers that have it now.

    where
        A pattern of module names, such as ``"blocks.1?.attn1"``. Cross-attention is never
        converted, whatever the pattern.
    order
        ``"raster"`` leaves the tokens as they come: a block of 64 is a strip of one frame.
        ``"cube"`` sorts them into boxes of frames × height × width patches, so that a block of keys
        is one box if the box has as many tokens and divides the grid. The outside of the model does
        not see it.
    options
        As :class:`sagebwd.sla2.Attention` takes them: alpha, rows, always, block_q, block_k,
        recipe, backward, deterministic.

    The new parameters (``….sla2.alpha.*``, ``….sla2.router.*``) have the dtype and device of the
    layer. They are in ``state_dict``. :func:`save` and :func:`load` keep a converted model on disk;
    ``save_pretrained`` writes the same and warns, because a plain ``from_pretrained`` knows nothing
    of them. :func:`revert` undoes the conversion.

    A language model runs with ``attn_implementation="sagebwd"`` from then on; layers that `where`
    leaves out have INT8 attention.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if "causal" in options:
        raise ValueError("causal: follows from the model, no video model is; leave it out")
    box = _box(order, box)
    found = {n: m for n, m in model.named_modules() if is_language_attention(m)}
    if found:
        if box != RASTER:
            raise ValueError(f"order: expected 'raster' for a language model, got {order!r}")
        return _convert_language(model, _chosen(found, where), keep, options)
    layers = _video_layers(model, where)
    door = _door(model, box)
    # All of them are made before any is put in: a bad option leaves the model as it was.
    made = {
        name: Attention(
            layer.heads,
            layer.inner_dim // layer.heads,
            keep=keep,
            order=box,
            **_place(layer.to_out[0].weight),
            **options,
        )
        for name, layer in layers.items()
    }
    if door is not None:
        door.attach(model)
    model.sla2_order = box
    for name, layer in layers.items():
        layer.sla2, layer.sla2_before = made[name], layer.processor
        layer.set_processor(Processor())
    saving.attach(model)
    return list(layers)


def _convert_language(model, layers, keep, options):
    made = {
        name: Attention(
            **language.sizes(name, layer),
            keep=keep,
            causal=True,
            **_place(layer.o_proj.weight),
            **options,
        )
        for name, layer in layers.items()
    }
    language.attach(model, layers)
    for name, layer in layers.items():
        layer.sla2 = made[name]
    saving.attach(model)
    return list(layers)


def _box(order, box):
    if order == "raster":
        return RASTER
    if order != "cube":
        raise ValueError(f"order: expected 'raster' or 'cube', got {order!r}")
    box = tuple(box)
    if len(box) != 3 or not all(isinstance(n, int) and n > 0 for n in box):
        raise ValueError(f"box: expected three numbers of patches above 0, got {box}")
    return box


def _video_layers(model, where):
    """{name: module} of the layers of a Wan model to convert."""
    attention = {n: m for n, m in model.named_modules() if is_wan_attention(m)}
    if not attention:
        raise NotImplementedError(
            "model: expected attention of a Wan model of diffusers, or of a Llama-like language "
            f"model of transformers, found none in {type(model).__name__}; in code of your own, "
            "call sagebwd.sla2.Attention where q, k and v are (causal=True for language models)"
        )
    return _chosen({n: m for n, m in attention.items() if not m.is_cross_attention}, where)


def _chosen(own, where):
    """Those of the self-attention layers {name: module} whose names fit the pattern."""
    layers = {name: m for name, m in own.items() if fnmatchcase(name, where)}
    if not layers:
        names = list(own)
        near = f"{names[0]!r} to {names[-1]!r}" if own else "none"
        raise ValueError(
            f"where: expected a pattern of self-attention layers, or a name ({near}), got {where!r}"
        )
    done = [name for name, m in layers.items() if hasattr(m, "sla2")]
    if done:
        raise ValueError(
            f"model: {', '.join(done)} is converted already; change `keep` of its module `sla2`, "
            "or start from a new model"
        )
    return layers


def _door(model, box):
    """What reorders tokens, if that is still to be done."""
    before = getattr(model, "sla2_order", None)
    if before is not None and before != box:
        raise ValueError(
            f"order: expected boxes of {before}, with which layers of this model were converted "
            f"before, got {box}"
        )
    if before == box or box == RASTER:
        return None
    if type(model).__name__ != "WanTransformer3DModel":
        raise NotImplementedError(
            f"order: 'cube' is for WanTransformer3DModel, got {type(model).__name__}, which mixes "
            "tokens outside of attention or is only a part of a model; use order='raster'"
        )
    return TokenOrder(box, model.config.patch_size)


def _place(weight):
    plain = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return {"device": weight.device, "dtype": weight.dtype if plain else torch.float32}
