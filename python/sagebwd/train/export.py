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

from .data.text import byte_symbols
from .errors import BadInput, RunError, writing
from .files import sync_directory, write_new
from .json_text import dumps
from .load import load_weights
from .model import EPS
from .tensor_file import write_tensors

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_END = 50256  # <|endoftext|> of GPT-2


def export(run, out=None, dtype="fp32", overwrite=False):
    """Writes the newest checkpoint of a run, or one checkpoint. Returns the directory."""
    loaded = load_weights(run, device="cpu")
    out = Path(out) if out else _default_out(loaded.path)
    if out.exists() and not overwrite and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"out: {out} is there; name another with --out, or replace it (--overwrite)")
    tensors = {name: t.to(_DTYPES[dtype]) for name, t in _weights(loaded.model).items()}
    config = _config(loaded, str(_DTYPES[dtype])[6:])
    texts = {"config.json": config, "generation_config.json": _generation(config)}
    files = {}
    if loaded.tokenizer is not None:
        more, files = _tokenizer_files(loaded.tokenizer)
        texts |= more
    with writing(out):
        _write(out, tensors, texts, files)
    return out


def _default_out(checkpoint):
    if checkpoint.parent.name == "checkpoints":
        return checkpoint.parent.parent / "export"
    return checkpoint.with_name(f"{checkpoint.name}-export")


def _write(out, tensors, texts, files):
    """Writes under a temporary name and renames last, so that the final name means complete."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        write_tensors(temporary / "model.safetensors", tensors, {"format": "pt"})
        for name, content in texts.items():
            write_new(temporary / name, dumps(content, indent=2) + "\n")
        for name, source in files.items():
            shutil.copyfile(source, temporary / name)
        sync_directory(temporary)
        if out.is_dir():
            shutil.rmtree(out)
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
    parser.add_argument("--overwrite", action="store_true", help="replace what is at DIR")
    args = parser.parse_args(arguments)
    try:
        out = export(args.run, args.out, args.dtype, args.overwrite)
    except RunError as error:
        print(f"sagebwd.train.export: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{out}: read it with transformers.AutoModelForCausalLM.from_pretrained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
