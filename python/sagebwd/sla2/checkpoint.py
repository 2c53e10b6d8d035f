# SPDX-License-Identifier: Apache-2.0
"""Converted models on disk, and back to what they were before."""

import json
import pathlib

from ..recipe import Recipe, without_removed
from . import language, saving
from .convert import convert
from .saving import FILE
from .saving import layers as _layers
from .token_order import RASTER, TokenOrder


def save(model, directory):
    """Saves a converted model with ``save_pretrained``, and beside it what :func:`load` needs to
    convert it again (``sla2.json``)."""
    _layers(model)  # raises if there are none
    type(model).save_pretrained(model, directory)
    saving.write(model, directory)


def load(kind, directory, **options):
    """A model that :func:`save` wrote: ``sla2.load(WanTransformer3DModel, directory)``. ``kind``
    has ``from_pretrained``, which gets the options. Its own warning that it does not know the
    weights of sla2 is of no concern here: they are read after the layers are converted."""
    from safetensors.torch import load_file

    directory = pathlib.Path(directory)
    if not (directory / FILE).is_file():
        raise FileNotFoundError(
            f"{directory / FILE}: expected a directory that sla2.save wrote, or "
            "save_pretrained of a converted model"
        )
    record = json.loads((directory / FILE).read_text())
    model = kind.from_pretrained(directory, **options)
    box = tuple(record["order"])
    order = {} if box == RASTER else {"order": "cube", "box": box}
    for name, given in record["layers"].items():
        given = dict(given, recipe=Recipe(**without_removed(given["recipe"])))
        convert(model, where=name, **order, **given)
    state = {}
    for file in sorted(directory.glob("*.safetensors")):
        state.update(load_file(file))
    for name, layer in _layers(model).items():
        start = f"{name}.sla2."
        own = {key[len(start) :]: x for key, x in state.items() if key.startswith(start)}
        layer.sla2.load_state_dict(own)  # strict: a missing weight raises
    return model


def revert(model):
    """Undoes :func:`convert`: the attention that was there before, without the parameters of sla2.
    What training did to other weights stays. Returns the names of the layers."""
    layers = _layers(model)
    saving.detach(model)
    for layer in layers.values():
        del layer.sla2
        if hasattr(layer, "sla2_before"):  # a processor of diffusers
            layer.set_processor(layer.sla2_before)
            del layer.sla2_before
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                owner = getattr(hook, "__self__", None)
                if hook is language.guard or isinstance(owner, TokenOrder):
                    del hooks[key]
    if hasattr(model, "sla2_order"):
        del model.sla2_order
    if hasattr(model, "sla2_before"):  # the name of an attention of transformers
        model.set_attn_implementation(model.sla2_before)
        del model.sla2_before
    return list(layers)
