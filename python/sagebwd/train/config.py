# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run: one flat dataclass, whose fields are also the command line's options
and the keys of ``config.json``."""

import math
from dataclasses import asdict, dataclass, field, fields, replace

from ..recipe import Recipe
from ..suggest import did_you_mean
from .errors import BadInput
from .json_text import dumps
from .presets import PRESETS


def _option(default, section, text, choices=None):
    return field(default=default, metadata={"section": section, "help": text, "choices": choices})


@dataclass(frozen=True)
class Config:
    # --- model
    layers: int = _option(4, "model", "transformer blocks")
    width: int = _option(128, "model", "residual stream")
    heads: int = _option(2, "model", "query heads; the head dim is width / heads")
    kv_heads: int = _option(
        0, "model", "key and value heads (grouped queries); 0: as many as heads"
    )
    ffn: int = _option(384, "model", "hidden width of the SwiGLU")
    context: int = _option(512, "model", "tokens of a sequence")
    vocab: int = _option(0, "model", "token ids; 0: what the data's format says")
    qk_norm: bool = _option(True, "model", "RMSNorm with a gain on every q and k head vector")
    tied: bool = _option(True, "model", "one matrix for the embedding and the output")
    rope_base: float = _option(10_000.0, "model", "base of the rotary position embedding")
    init: str = _option(
        "", "model", "weights to start from: a run or a checkpoint; the optimizer starts anew"
    )

    # --- attention
    attention: str = _option(
        "sagebwd",
        "attention",
        "fpa: PyTorch's own, in the run's dtype; sagebwd: INT8; exact: PyTorch's in float32",
        ("fpa", "sagebwd", "exact"),
    )
    recipe: str = _option(
        "vectorwise",
        "attention",
        "of INT8: vectorwise or paper, with the switches that differ from it: "
        "'paper rounding=dither lift=dQ,dK'; dither takes a new seed every step (sagebwd recipe "
        "lists the switches)",
    )

    # --- batch and optimizer
    tokens_per_step: int = _option(
        4096, "optimizer", "tokens of an optimizer step, over all ranks; 2.1M works too"
    )
    micro_batch: int = _option(
        0, "optimizer", "sequences of one forward on one rank; 0: chosen for the device"
    )
    steps: int = _option(100, "optimizer", "optimizer steps of the whole run")
    lr: float = _option(3e-3, "optimizer", "peak learning rate")
    min_lr: float = _option(0.1, "optimizer", "last learning rate, as a share of the peak")
    warmup: int = _option(10, "optimizer", "steps of linear warm-up; then a cosine")
    weight_decay: float = _option(0.1, "optimizer", "AdamW, on matrices only")
    beta1: float = _option(0.9, "optimizer", "AdamW")
    beta2: float = _option(0.95, "optimizer", "AdamW")
    eps: float = _option(1e-8, "optimizer", "AdamW")
    clip: float = _option(1.0, "optimizer", "largest gradient norm; 0: no clipping")

    # --- data
    data: str = _option(
        "",
        "data",
        "file or directory (commas between several): llm.c or nanoGPT .bin, .u16.xz, plain text; "
        "nothing: the sources of Python's standard library as bytes",
    )
    val: str = _option("", "data", "held-out data; nothing: val* files, else the end of the data")
    tokenizer: str = _option(
        "bytes", "data", "for plain text: bytes, or a directory with GPT-2's BPE files"
    )
    as_bytes: bool = _option(
        False, "data", "read token shards as the bytes they stand for (needs --tokenizer DIR)"
    )
    unpack_limit: float = _option(
        4.0,
        "data",
        "gigabytes of one text file, or that one .xz file may unpack to; they stay in memory",
    )
    eval_every: int = _option(50, "data", "steps between evaluations; 0: only at the end")
    eval_tokens: int = _option(65_536, "data", "tokens of an evaluation, always the same ones")

    # --- seeds
    seed: int = _option(0, "seeds", "initial weights, and dithered rounding")
    data_seed: int = _option(0, "seeds", "order of the data")
    deterministic: bool = _option(False, "seeds", "same bits from run to run, on CUDA too")

    # --- device
    device: str = _option(
        "auto", "device", "auto: CUDA where there is one", ("auto", "cpu", "cuda")
    )
    dtype: str = _option(
        "auto", "device", "of autocast; auto: bf16 on CUDA, fp32 on a CPU", ("auto", "fp32", "bf16")
    )
    compile: str = _option(
        "off",
        "device",
        "torch.compile of every block, by backend",
        ("off", "inductor", "aot_eager"),
    )
    recompute: bool = _option(False, "device", "activation checkpointing: recompute every block")
    threads: int = _option(0, "device", "CPU threads; 0: PyTorch's choice")

    # --- distributed (start with torchrun)
    parallel: str = _option("ddp", "distributed", "copies or shards", ("ddp", "fsdp"))
    context_parallel: int = _option(1, "distributed", "ranks that share one sequence (a ring)")

    # --- output
    out: str = _option("runs-out/run", "output", "directory of the run")
    resume: str = _option(
        "", "output", "auto: the newest complete checkpoint of --out, if any; or a checkpoint"
    )
    overwrite: bool = _option(
        False, "output", "start anew in a directory that holds a run; its checkpoints are removed"
    )
    save_every: int = _option(0, "output", "steps between checkpoints; 0: by the clock alone")
    save_minutes: float = _option(
        10.0, "output", "minutes after which a checkpoint is due; 0: by --save-every alone"
    )
    keep: int = _option(2, "output", "checkpoints to keep; 0: none is written")
    time_limit: float = _option(
        0.0,
        "output",
        "seconds, the reading of data included, until it saves and stops (exit code 5); 0: none",
    )
    log_every: int = _option(1, "output", "steps between console lines; log.jsonl has every step")
    tensorboard: bool = _option(False, "output", "also write TensorBoard events")
    wandb: str = _option("", "output", "also log to this Weights & Biases project")
    audit_every: int = _option(
        0, "output", "steps between gradient audits of one attention layer; 0: none"
    )
    sample_tokens: int = _option(0, "output", "tokens of sample text at the end")
    prompt: str = _option("", "output", "how the sample text begins")

    # --- derived

    @property
    def head_dim(self):
        return self.width // self.heads

    @property
    def sequences(self):
        """Of one optimizer step, over all ranks."""
        return self.tokens_per_step // self.context

    def make_recipe(self):
        """The INT8 recipe, with the first seed of dither."""
        return Recipe.parse(self.recipe)

    def describe_attention(self):
        """A short name: ``fpa``, ``vectorwise``, ``paper rounding=dither lift=dQ,dK``."""
        return self.recipe if self.attention == "sagebwd" else self.attention

    def to_json(self):
        return dumps(asdict(self), indent=1) + "\n"


FIELDS = {f.name: f for f in fields(Config)}

#: Fields that say what is computed. Two runs that agree in these (and in their data) compute the
#: same losses. A run can resume only from a checkpoint that agrees with it.
NUMERIC = tuple(
    name
    for name, f in FIELDS.items()
    if f.metadata["section"] in ("model", "attention", "optimizer", "seeds")
    and name not in ("micro_batch", "deterministic")
) + ("context_parallel",)


def from_dict(values, base=None):
    """A Config from strings or values by field name, over ``base``."""
    changes = {}
    for name, value in values.items():
        if name not in FIELDS:
            near = did_you_mean(name, FIELDS) or "; see --help for the list"
            raise BadInput(f"config: no field is named {name!r}{near}")
        changes[name] = _convert(name, value)
    return replace(base or Config(), **changes)


#: Fields of older versions, with the values that changed nothing: switches of the recipe.
_OLD = {"rounding": "nearest", "smoothing": "recipe", "lift": "", "tile_q": 0, "tile_k": 0}


def upgraded(values):
    """The values of a configuration that any version wrote, as this one has them."""
    values = dict(values)
    old = {name: values.pop(name) for name in _OLD if name in values}
    changes = {name: value for name, value in old.items() if value != _OLD[name]}
    if not changes:
        return values
    smoothing = changes.pop("smoothing", None)
    if smoothing is not None:
        changes.update(smooth_k="k" in smoothing, smooth_q="q" in smoothing)
    if "lift" in changes:
        names = (name.strip() for name in changes.pop("lift").split(","))
        changes["high_precision"] = tuple(filter(None, names))
    try:
        recipe = replace(Recipe.parse(values.get("recipe", "vectorwise")), **changes)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"config: {error}") from None
    return {**values, "recipe": recipe.text()}


def preset(name, **changes):
    if name not in PRESETS:
        raise BadInput(
            f"preset: expected one of {', '.join(PRESETS)}, got {name!r}"
            f"{did_you_mean(name, PRESETS)}"
        )
    return replace(Config(), **{**PRESETS[name], **changes})


def _convert(name, value):
    kind, choices = FIELDS[name].type, FIELDS[name].metadata["choices"]
    try:
        if kind is bool:
            value = _boolean(value)
        elif kind is int:
            value = count(value)
        elif kind is float:
            value = _number(value)
        elif not isinstance(value, str):
            raise TypeError(value)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise BadInput(f"{name}: expected a value of type {kind.__name__}, got {value!r}") from None
    if choices and value not in choices:
        raise BadInput(
            f"{name}: expected one of {', '.join(choices)}, got {value!r}"
            f"{did_you_mean(value, choices)}"
        )
    return _recipe_text(value) if name == "recipe" else value


def _recipe_text(text):
    """The shortest text of the same recipe, so that equal recipes are equal in a configuration."""
    try:
        return Recipe.parse(text).text()
    except ValueError as error:
        raise BadInput(str(error)) from None


def _boolean(value):
    if isinstance(value, bool):
        return value
    return {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False,
            "off": False, "0": False}[str(value).lower()]  # fmt: skip


def _number(value):
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def count(value):
    """An integer; ``"16K"`` and ``"2M"`` are powers of two times it, ``"2.1M"`` is 2^21."""
    if isinstance(value, str):
        text = value.strip().replace("_", "").replace(",", "")
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
        if factor > 1:
            # People write 2.1M and 262K for 2^21 and 2^18: take a power of two within 3 %.
            exact = float(text[:-1]) * factor
            plain = float(text[:-1]) * (1000 if factor == 1 << 10 else 10**6)
            for power in range(10, 40):
                if abs(plain - 2**power) <= 0.03 * 2**power:
                    return 2**power
            return int(exact)
        return int(text)
    if isinstance(value, bool) or int(value) != value:
        raise ValueError(value)
    return int(value)


#: (least, most) of the numbers; what is not named here may be 0 or any larger number.
_LIMITS = {
    **dict.fromkeys(
        ("layers", "width", "heads", "ffn", "context", "tokens_per_step", "steps",
         "context_parallel", "log_every", "eval_tokens"),
        (1, None),
    ),
    "rope_base": (1.0, None),
    "min_lr": (0.0, 1.0),
    "seed": (0, 2**63 - 1),
    "data_seed": (0, 2**63 - 1),
    "threads": (0, 1024),
}  # fmt: skip
_POSITIVE = ("lr", "eps", "unpack_limit")
_BELOW_ONE = ("beta1", "beta2")


def check(config):
    """Raises BadInput for a configuration that contradicts itself. Data and devices are checked
    where they are opened."""
    for name, f in FIELDS.items():
        _check_value(name, getattr(config, name), f.type, f.metadata["choices"])
    c = config
    if not c.out:
        raise BadInput("out: expected a directory, got nothing")
    if c.width % c.heads:
        raise BadInput(f"heads: expected a divisor of the width {c.width}, got {c.heads}")
    if c.head_dim % 8 or c.head_dim > 256:
        raise BadInput(
            f"head dim: expected a multiple of 8 up to 256, got {c.head_dim} (width / heads)"
        )
    if c.kv_heads and c.heads % c.kv_heads:
        raise BadInput(f"kv_heads: expected a divisor of {c.heads} heads, got {c.kv_heads}")
    if c.tokens_per_step % c.context:
        near = max(1, round(c.tokens_per_step / c.context)) * c.context
        raise BadInput(
            f"tokens_per_step: expected a multiple of the context {c.context}, got "
            f"{c.tokens_per_step}; {near} would do"
        )
    _recipe_text(c.recipe)


def _check_value(name, value, kind, choices):
    taken = (float, int) if kind is float else kind
    if not isinstance(value, taken) or (kind is not bool and isinstance(value, bool)):
        raise BadInput(f"{name}: expected a value of type {kind.__name__}, got {value!r}")
    if choices and value not in choices:
        raise BadInput(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    if kind is str and "\0" in value:
        raise BadInput(f"{name}: expected text without null characters, got {value!r}")
    if kind not in (int, float):
        return
    if isinstance(value, int) and abs(value) >= 2**63:
        raise BadInput(f"{name}: expected a number below 2^63, got {value}")
    if not math.isfinite(value):
        raise BadInput(f"{name}: expected a finite number, got {value}")
    least, most = _LIMITS.get(name, (0, None))
    if name in _POSITIVE and value <= 0:
        raise BadInput(f"{name}: expected a positive number, got {value}")
    if name in _BELOW_ONE and not 0 <= value < 1:
        raise BadInput(f"{name}: expected a number from 0 to below 1, got {value}")
    if value < least:
        words = f"at least {least}" if least else "0 or more"
        raise BadInput(f"{name}: expected {words}, got {value}")
    if most is not None and value > most:
        raise BadInput(f"{name}: expected at most {most}, got {value}")
