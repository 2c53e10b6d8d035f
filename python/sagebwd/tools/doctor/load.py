# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a model with one batch and a loss. Nothing of a checkpoint is executed: classes
come from the installed transformers and diffusers."""

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


class CannotExamine(Exception):
    """The message says what was found and what to do instead."""


#: What to do with any model that cannot be examined here.
BY_HAND = "sagebwd.diagnose(model, batch) takes any model in Python"


@dataclass
class Subject:
    """What is examined."""

    library: str  # "transformers" or "diffusers"
    model: torch.nn.Module
    batch: dict
    loss: Callable  # of the model's output
    words: str  # what the batch is


def load(name, device, tokens, pixels, text=None):
    """The Subject of a directory, or of a name on the hub that huggingface_hub can reach."""
    index, config = (_json(name, file) for file in ("model_index.json", "config.json"))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if index is not None:
        return _diffusers(name, device, dtype, pixels)
    if config is None:
        raise CannotExamine(
            f"{name}: expected a checkpoint of transformers (config.json) or a pipeline of "
            "diffusers (model_index.json), in a directory or on the hub, and found neither"
        )
    if "_class_name" in config:
        raise CannotExamine(
            f"{name}: a part of a pipeline of diffusers, {config['_class_name']}, whose inputs the "
            f"other parts make: give the pipeline's directory, or {BY_HAND}"
        )
    return _transformers(name, config, device, dtype, tokens, pixels, text)


def _json(name, file):
    if os.path.isdir(name):
        path = Path(name, file)
        return json.loads(path.read_text()) if path.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return json.loads(Path(hf_hub_download(name, file)).read_text())
    except (EntryNotFoundError, LocalEntryNotFoundError):  # the latter: the hub cannot be reached
        return None
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise CannotExamine(
            f"{name}: neither a directory nor a name on the hub ({type(error).__name__})"
        ) from None


# --- transformers ---------------------------------------------------------------------------------


def _transformers(name, config, device, dtype, tokens, pixels, text):
    import transformers

    named = (config.get("architectures") or [None])[0]
    kind = getattr(transformers, named or "", None)
    if kind is None:
        raise CannotExamine(
            f"{name}: config.json names the class {named}, which transformers "
            f"{transformers.__version__} does not have: install the one that it was made with, or "
            f"{BY_HAND}"
        )
    try:
        model = kind.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:  # attention of its own, which may call PyTorch's all the same
        if "attention" not in str(error):
            raise
        model = kind.from_pretrained(name, dtype=dtype)
    model = model.to(device).eval()
    batch, words = _inputs(name, model, tokens, pixels, text)
    if _predicts_words(model):
        batch["labels"] = batch["input_ids"]
        return Subject("transformers", model, batch, lambda output: output.loss, words)
    return Subject("transformers", model, batch, _mean_square, words)


def _inputs(name, model, tokens, pixels, text):
    if model.main_input_name == "input_ids":
        ids, words = _words(name, model, tokens, text)
        return {"input_ids": ids.to(model.device)}, words
    if model.main_input_name == "pixel_values":
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "image_size", pixels)
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        shape = (1, getattr(config, "num_channels", 3), *sides)
        image = torch.randn(shape, generator=_generator()).to(model.device, model.dtype)
        return {"pixel_values": image}, f"one image of noise, {sides[0]} × {sides[1]}"
    raise CannotExamine(
        f"{name}: {type(model).__name__} reads {model.main_input_name}, for which there is no "
        f"batch here: {BY_HAND}"
    )


def _words(name, model, tokens, text):
    """[1, tokens] of text in the checkpoint's own tokens, and what they are."""
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    tokens = min(tokens, most) if isinstance(most, int) and most > 1 else tokens
    source = Path(text).read_text(encoding="utf-8") if text else _prose()
    ids = _tokenized(name, source, tokens)
    if ids is not None and int(ids.max()) < config.vocab_size:
        return ids, f"{ids.shape[1]} tokens of {os.path.basename(text) if text else 'English text'}"
    if text:
        raise CannotExamine(f"{name}: has no tokenizer for {text}: leave --text out")
    ids = torch.randint(config.vocab_size, (1, tokens), generator=_generator())
    return ids, f"{tokens} random tokens, as the checkpoint has no tokenizer"


def _tokenized(name, source, tokens):
    """[1, tokens], or None without a tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError):
        return None
    ids = tokenizer(source, return_tensors="pt", truncation=True, max_length=tokens).input_ids
    # A class without its files makes one unknown token of everything.
    return ids if len(ids.unique()) > 8 else None


def _prose():
    """English that every machine with Python has: the texts of its help()."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _predicts_words(model):
    ends = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
    reads = model.main_input_name == "input_ids"
    return reads and type(model).__name__.endswith(ends)


def _mean_square(output):
    """For models without a loss of their own."""
    first = next(t for t in output.to_tuple() if torch.is_tensor(t) and t.is_floating_point())
    return first.float().square().mean()


# --- diffusers ------------------------------------------------------------------------------------

_STEPS, _CALL = 4, 3  # the call of the denoiser that is examined, in a run of so many steps


class _Reached(Exception):
    """The call that is examined has come."""


def _diffusers(name, device, dtype, pixels):
    """A pipeline makes the inputs of its denoiser, up to the middle of a run."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(name, dtype=dtype).to(device, dtype)
    pipeline.set_progress_bar_config(disable=True)
    model = getattr(pipeline, "transformer", None) or getattr(pipeline, "unet", None)
    if model is None:
        raise CannotExamine(
            f"{name}: {type(pipeline).__name__} has no transformer and no unet: {BY_HAND}"
        )
    # Else it has what was last chosen for any model of this process, ours perhaps.
    model.set_attention_backend("native")
    arguments = _arguments(name, pipeline, pixels)
    seen = []

    def look(module, args, kwargs):
        seen.append(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        if len(seen) == _CALL:
            raise _Reached

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        pipeline(**arguments)
    except _Reached:
        pass
    finally:
        hook.remove()
    if not seen:
        raise CannotExamine(f"{name}: {type(pipeline).__name__} never called its denoiser")
    batch = {key: _copied(value) for key, value in seen[-1].items()}
    batch = {**batch.pop("kwargs", {}), **batch}
    words = f"the denoiser's call {len(seen)} in {_STEPS} steps at {pixels} × {pixels} pixels"
    return Subject("diffusers", model.eval(), batch, _to_noise, words)


def _arguments(name, pipeline, pixels):
    """Of a pipeline's call, by the names in its signature."""
    known = inspect.signature(pipeline.__call__).parameters
    offered = dict(
        prompt="a red fox walks through fresh snow",
        num_inference_steps=_STEPS,
        height=pixels,
        width=pixels,
        num_frames=9,
        class_labels=[0],
        output_type="latent",
        generator=_generator(),
    )
    needed = [n for n, p in known.items() if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    needed += [n for n, p in known.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if "image" in needed:
        from PIL import Image

        offered["image"] = Image.effect_noise((pixels, pixels), 64).convert("RGB")
    if lacking := set(needed) - set(offered):
        raise CannotExamine(
            f"{name}: {type(pipeline).__name__} needs {', '.join(sorted(lacking))}: {BY_HAND}"
        )
    return {key: value for key, value in offered.items() if key in known}


def _copied(value):
    """Arguments of a call that was made without gradients, for one with them."""
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(x) for x in value)
    return value


def _to_noise(output):
    """What training minimises: the distance to a tensor of noise."""
    out = (output[0] if isinstance(output, tuple) else output.sample).float()
    noise = torch.randn(out.shape, generator=_generator()).to(out.device)
    return (out - noise).square().mean()


def _generator():
    return torch.Generator().manual_seed(0)
