# SPDX-License-Identifier: Apache-2.0
"""Makes a directory that transformers reads: ``AutoModelForCausalLM.from_pretrained(DIR)``.

    python -m sagebwd.train.export RUN                         into RUN/export
    python -m sagebwd.train.export RUN --out DIR --dtype bf16

A run without QK-norm becomes a Llama. One with QK-norm becomes a Qwen3, which is a Llama that
normalises every q and k head vector before the rotation, as ours does. A byte run gets a tokenizer
whose ids are the bytes; a run with GPT-2's BPE gets those files; otherwise no tokenizer is written.
transformers itself is not needed here.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch

from . import checkpoint
from .data.text import byte_symbols
from .errors import BadInput, exit_code, writing
from .files import sync_directory, write_new
from .json_text import dumps
from .load import load_weights
from .model import EPS
from .tensor_file import read_metadata, write_tensors

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_END = 50256  # <|endoftext|> of GPT-2
#: In the header of the weights. A model that anything else has saved does not have it.
_MADE_BY = {"made_by": "sagebwd.train.export"}
_NAMES = {
    "model.safetensors", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.json", "merges.txt",
}  # fmt: skip


def export(run, out=None, dtype="fp32", overwrite=False):
    """Writes the newest checkpoint of a run, or one checkpoint. Returns the directory."""
    path = checkpoint.find(run)
    out = Path(out) if out else _default_out(path)
    place = Path(os.path.realpath(out))
    _check_place(out, place, path, overwrite)
    loaded = load_weights(path, device="cpu")
    tensors = {name: _converted(name, t, dtype) for name, t in _weights(loaded.model).items()}
    config = _config(loaded, str(_DTYPES[dtype])[6:])
    texts = {"config.json": config, "generation_config.json": _generation(config)}
    files = {}
    if loaded.tokenizer is not None:
        more, files = _tokenizer_files(loaded.tokenizer)
        texts |= more
    with writing(out):
        _write(place, tensors, texts, files)
    return out


def _converted(name, t, dtype):
    out = t.to(_DTYPES[dtype])
    if not out.isfinite().all():
        if not t.isfinite().all():
            raise BadInput(f"{name} has values that are not finite: this model has gone wrong")
        other = "bf16" if dtype == "fp16" else "fp32"
        raise BadInput(
            f"dtype: {name} has values up to {t.abs().max().item():.4g}, {dtype} ends at "
            f"{torch.finfo(out.dtype).max:.6g}; take --dtype {other}"
        )
    return out


def _check_place(out, place, path, overwrite):
    """Raises unless a directory may be made at ``place``: nothing is there, or it is empty, or it
    is an export that may be replaced. ``path``: the checkpoint."""
    another = "name another directory with --out"
    path = Path(os.path.realpath(path))
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    for kept, words in ((run, "the run"), (Path.cwd(), "the directory you are in")):
        if place == kept or place in kept.parents:
            raise BadInput(f"out: {out} is or holds {words}; {another}")
    if path == place or path in place.parents or run / "checkpoints" in (place, *place.parents):
        raise BadInput(f"out: {out} is among the checkpoints of the run; {another}")
    try:
        if not place.exists():
            return
        if not place.is_dir():
            raise BadInput(f"out: {out} is not a directory; {another}")
        found = {p.name for p in place.iterdir()}
    except OSError as error:
        raise BadInput(f"out: {out} cannot be read ({error.strerror or error})") from None
    if not found:
        return
    if not overwrite:
        raise BadInput(f"out: {out} is there; {another}, or replace it (--overwrite)")
    if not _is_export(place, found):
        more = sorted(found - _NAMES)
        what = f"holds {more[0]}" if more else "was not made by this command"
        raise BadInput(
            f"out: {out} {what}; --overwrite replaces what an earlier export has made and nothing "
            f"else: {another}, or remove it yourself"
        )


def _is_export(place, found):
    """Every file is one of ours. One that the user has put there is the user's."""
    weights = place / "model.safetensors"
    if not found <= _NAMES or not weights.is_file():
        return False
    try:
        return _MADE_BY.items() <= read_metadata(weights).items()
    except (OSError, BadInput):
        return False


def _default_out(checkpoint):
    if checkpoint.parent.name == "checkpoints":
        return checkpoint.parent.parent / "export"
    return checkpoint.with_name(f"{checkpoint.name}-export")


def _write(out, tensors, texts, files):
    """Writes under a temporary name and renames last, so that the final name means complete. An
    older export stays whole until the new one is."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    older = out.with_name(f".{out.name}.{os.getpid()}.old.tmp")
    try:
        temporary.mkdir(parents=True)
        metadata = {"format": "pt", **_MADE_BY}
        write_tensors(temporary / "model.safetensors", tensors, metadata)
        for name, content in texts.items():
            write_new(temporary / name, dumps(content, indent=2) + "\n")
        for name, source in files.items():
            shutil.copyfile(source, temporary / name)
        sync_directory(temporary)
        if out.exists():
            os.rename(out, older)
        try:
            os.rename(temporary, out)
        except BaseException:
            if older.exists():
                os.rename(older, out)
            raise
        sync_directory(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(older, ignore_errors=True)


# --- the model ------------------------------------------------------------------------------------


def _weights(model):
    """Weights under the names of transformers, one matrix each. Rows that only fill the vocabulary
    up to a round number are left out."""
    c, own = model.config, {n: p.detach() for n, p in model.named_parameters()}
    out = {"model.embed_tokens.weight": own["embedding.weight"][: model.vocab]}
    for i, block in enumerate(model.blocks):
        here, there = f"blocks.{i}.", f"model.layers.{i}."
        qkv = own[here + "attention.qkv.weight"]
        for name, rows in block.attention.row_slices().items():
            out[f"{there}self_attn.{name[1]}_proj.weight"] = qkv[rows]
        out[there + "self_attn.o_proj.weight"] = own[here + "attention.out.weight"]
        if c.qk_norm:
            for name in ("q_norm", "k_norm"):
                out[f"{there}self_attn.{name}.weight"] = own[f"{here}attention.{name}.gain"]
        gate, up = own[here + "ffn.gate_up.weight"].chunk(2)
        out[there + "mlp.gate_proj.weight"], out[there + "mlp.up_proj.weight"] = gate, up
        out[there + "mlp.down_proj.weight"] = own[here + "ffn.down.weight"]
        out[there + "input_layernorm.weight"] = own[here + "attention_norm.gain"]
        out[there + "post_attention_layernorm.weight"] = own[here + "ffn_norm.gain"]
    out["model.norm.weight"] = own["norm.gain"]
    if not c.tied:
        out["lm_head.weight"] = own["head.weight"][: model.vocab]
    return out


def _config(loaded, dtype):
    c = loaded.config
    kind, name = ("qwen3", "Qwen3") if c.qk_norm else ("llama", "Llama")
    end = _END if loaded.tokenizer is not None and loaded.tokenizer.name == "gpt2" else None
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "vocab_size": loaded.model.vocab,
        "hidden_size": c.width,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads or c.heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": c.tied,
        # Older and newer versions of transformers read the base from one or the other.
        "rope_theta": c.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
        "torch_dtype": dtype,
        "dtype": dtype,
        # Written even if there are none, because the defaults would stop at the bytes 1 and 2.
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
    }


def _generation(config):
    keep = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"do_sample": True, "temperature": 0.8, **{name: config[name] for name in keep}}


# --- the tokenizer --------------------------------------------------------------------------------


def _tokenizer_files(tokenizer):
    """({name: JSON content}, {name: file to copy})."""
    if tokenizer.name == "bytes":
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        }  # fmt: skip
        return {"tokenizer.json": _byte_tokenizer(), "tokenizer_config.json": config}, {}
    end = "<|endoftext|>"
    config = {
        "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": end,
        "eos_token": end, "unk_token": end, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    words, merges = tokenizer.files
    return {"tokenizer_config.json": config}, {"vocab.json": words, "merges.txt": merges}


def _byte_tokenizer():
    """A byte-level BPE without merges, in the format of the package `tokenizers`: byte b is
    token b."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {symbol: byte for byte, symbol in byte_symbols().items()},
            "merges": [],
        },
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m sagebwd.train.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="directory of a run, or one checkpoint")
    parser.add_argument("--out", metavar="DIR", help="directory to make (default: RUN/export)")
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32", help="default fp32")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    args = parser.parse_args(arguments)

    def work():
        out = export(args.run, args.out, args.dtype, args.overwrite)
        print(f"{out}: read it with transformers.AutoModelForCausalLM.from_pretrained")

    return exit_code("sagebwd.train.export", work)


if __name__ == "__main__":
    sys.exit(main())
