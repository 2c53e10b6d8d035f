# SPDX-License-Identifier: Apache-2.0
"""What is written beside the weights of a converted model, so that it can be converted again."""

import dataclasses
import inspect
import json
import pathlib
import warnings

from .attention import Attention
from .token_order import RASTER

FILE = "sla2.json"


class SavePretrained:
    """``save_pretrained`` of a converted model. A plain ``from_pretrained`` leaves out what it does
    not know, so this writes what ``sla2.load`` needs, and says so."""

    def __init__(self, model):
        self.model = model

    def __call__(self, save_directory, *args, **kwargs):
        kind = type(self.model)
        done = kind.save_pretrained(self.model, save_directory, *args, **kwargs)
        # The processes of a distributed run may all come here; one of them writes.
        if (
            inspect.signature(self)
            .bind(save_directory, *args, **kwargs)
            .arguments.get("is_main_process", True)
        ):
            write(self.model, save_directory)
            warnings.warn(
                f"sla2: {kind.__name__} is saved with the routers and alphas of sla2, which its "
                "from_pretrained would leave out; load it with sagebwd.sla2.load"
                f"({kind.__name__}, {str(save_directory)!r})",
                stacklevel=2,
            )
        return done

    @property
    def __signature__(self):  # pipelines of diffusers look which options there are
        whole = inspect.signature(type(self.model).save_pretrained)
        return whole.replace(parameters=list(whole.parameters.values())[1:])


def attach(model):
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = SavePretrained(model)


def detach(model):
    if isinstance(vars(model).get("save_pretrained"), SavePretrained):
        del model.save_pretrained


def write(model, directory):
    record = {
        "order": list(getattr(model, "sla2_order", RASTER)),
        "layers": {name: _written(layer.sla2) for name, layer in layers(model).items()},
    }
    (pathlib.Path(directory) / FILE).write_text(json.dumps(record, indent=1) + "\n")


def layers(model):
    """{name: module} of the converted layers of a model."""
    found = {
        n: m for n, m in model.named_modules() if isinstance(getattr(m, "sla2", None), Attention)
    }
    if not found:
        raise ValueError(
            f"model: expected one that sla2.convert changed, got {type(model).__name__}"
        )
    return found


def _written(layer):
    options = dict(layer.options, keep=layer.keep)
    return dict(options, recipe=dataclasses.asdict(layer.call["recipe"]))
