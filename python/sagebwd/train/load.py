# SPDX-License-Identifier: Apache-2.0
"""Loads a trained model from its checkpoint, with its configuration and data, for instruments."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from . import checkpoint, state
from .config import Config, check, from_dict, upgraded
from .data import Batches, Source, open_data
from .data.text import make_tokenizer
from .errors import BadInput
from .loop import run_dtype
from .model import Llama, build, parameter_count


@dataclass
class Loaded:
    path: Path
    step: int
    sequences_read: int
    config: Config
    model: Llama
    device: torch.device
    tokenizer: object  # None: unknown
    source: Source = None  # None: the data was not opened

    def autocast(self):
        bf16 = run_dtype(self.config, self.device) == torch.bfloat16
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16)

    def unseen(self):
        """The run's training data in its order; sequences from ``sequences_read`` on are new to
        the model until an epoch is over."""
        c = self.config
        return Batches(self.source.train, c.context, c.data_seed, self.device)


def load_model(run, **changes):
    """The newest checkpoint of a run, or one checkpoint, in one process, with its data.
    ``changes``: fields of the configuration to replace, such as data or device."""
    loaded = load_weights(run, **changes)
    loaded.source = open_data(loaded.config)
    return loaded


def load_weights(run, **changes):
    """The same without the data, which need not be there any more."""
    path = checkpoint.find(run)
    saved, tensors = checkpoint.load(path)
    config = from_dict({**upgraded(saved["config"]), "micro_batch": 0, **changes})
    config = replace(config, context_parallel=1, recompute=False, compile="off", resume="")
    check(config)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device: cuda was asked for, but PyTorch sees no CUDA device")
    use_gpu = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    if config.threads:
        torch.set_num_threads(config.threads)
    # Before a model is made: a damaged configuration may describe one of any size.
    there = sum(t.numel() for t in tensors["weights"].values())
    expected = parameter_count(config, saved["vocab"])
    if there != expected:
        raise BadInput(
            f"{path}: its weights are {there} numbers, the model that its configuration describes "
            f"has {expected}; state.json is not the one they were saved with"
        )
    model = build(config, saved["vocab"], device)
    try:
        state.restore_weights(model, tensors["weights"])
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from None
    tokenizer = _tokenizer(saved, config, "tokenizer" in changes)
    return Loaded(path, saved["step"], saved["sequences_read"], config, model, device, tokenizer)


def _tokenizer(saved, config, is_given):
    """What the ids of a run stand for. The checkpoint says so; in format 1 the vocabulary does."""
    if is_given:
        return make_tokenizer(config.tokenizer)
    name = saved.get("tokenizer", "bytes" if saved["vocab"] == 256 else "gpt2")
    if name == "gpt2" and config.tokenizer != "bytes":
        return make_tokenizer(config.tokenizer)
    return make_tokenizer("bytes") if name == "bytes" else None
