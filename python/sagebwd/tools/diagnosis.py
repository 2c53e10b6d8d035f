# SPDX-License-Identifier: Apache-2.0
"""How well would INT8 attention do in this model? ``sagebwd.diagnose`` runs one batch, captures the
inputs of every attention layer, and compares INT8 with exact attention on them."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Optional, TextIO

import torch

from .. import padding
from ..attention import attention, is_supported
from ..recipe import Recipe, as_recipe
from .capture import Capture, save

#: Relative errors up to which a layer is called fine, and usable.
FINE, USABLE = 0.06, 0.15


class NoAttention(ValueError):
    """The model called no attention that can be captured."""


@dataclass
class LayerReport:
    """Relative L2 errors of one layer against exact attention, its largest logit, and a verdict."""

    index: int
    errors: dict = field(default_factory=dict)  # of O, dQ, dK, dV, P, dS
    max_logit: float = math.nan
    verdict: str = ""
    remedy: str = ""  # of those that were tried, the one that helps most; "" where none is needed


@dataclass(repr=False)
class Report:
    layers: list

    def __str__(self):
        names = ("O", "dQ", "dK", "dV", "P", "dS")
        lines = ["layer " + "".join(f"{n:>8}" for n in names) + "  max logit  verdict"]
        for layer in self.layers:
            cells = "".join(
                f"{layer.errors[n]:8.4f}" if n in layer.errors else "       -" for n in names
            )
            lines.append(f"{layer.index:5} {cells}  {layer.max_logit:9.2f}  {layer.verdict}")
        return "\n".join(lines)

    __repr__ = __str__


def diagnose(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    recipe: str | Recipe = "vectorwise",
    save_to: str | os.PathLike | None = None,
    file: TextIO | None = None,
) -> "Report":
    """Runs ``model`` on ``batch`` forward and backward with its own attention, and reports for
    every layer the error that INT8 attention would have had. ``print`` shows the
    :class:`Report` that it returns as a table.

    batch
        A dict (``model(**batch)``), a tuple (``model(*batch)``) or a single argument.
    loss
        Function from the model's output to a scalar. Not needed when the output has a ``loss``, as
        models of transformers have when the batch holds labels.
    save_to
        File for the captured tensors (safetensors), as ``sagebwd trace`` reads them.
    file
        Where to print the table as well, such as ``sys.stdout``.

    It finds attention that goes through ``F.scaled_dot_product_attention`` (transformers:
    ``attn_implementation="sdpa"``), ``nn.MultiheadAttention`` or this library. Masks may describe
    padding, a causal mask, a sliding window, documents or few sets of queries that see the same
    keys. Layers with dropout or masks of other kinds are named but not compared. Gradients of the
    parameters stay as they were.
    """
    layers = _run(model, batch, loss)
    if save_to is not None:
        save(layers, save_to)
    report = Report([_layer(i, layer, as_recipe(recipe)) for i, layer in enumerate(layers)])
    if file is not None:
        print(report, file=file)
    return report


def _run(model, batch, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        with Capture(model) as capture, torch.enable_grad():
            if isinstance(batch, dict):
                output = model(**batch)
            else:
                output = model(*batch) if isinstance(batch, tuple) else model(batch)
        value = loss(output) if loss is not None else getattr(output, "loss", None)
        if value is None:
            raise ValueError("diagnose: the model's output has no loss; pass loss=")
        value.backward()
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad
    if not capture.layers:
        raise NoAttention(
            "diagnose: no attention call was seen; the model must use "
            "F.scaled_dot_product_attention or sagebwd"
        )
    return capture.layers


def _layer(index, layer, recipe):
    if layer.unsupported or layer.dout is None:
        why = layer.unsupported or "no gradient came back to it"
        return LayerReport(index, verdict=f"not compared: {why}")
    support = is_supported(layer.q, layer.k, layer.v, layout="bhsd", recipe=recipe)
    if not support:
        return LayerReport(index, verdict=f"not compared: {support.reason}")
    exact = [(piece, _exact(piece)) for piece in layer.pieces()]
    if not exact:
        return LayerReport(index, verdict="not compared: no query sees a key")
    errors, max_logit = _errors(exact, recipe)
    return LayerReport(index, errors, max_logit, *_verdict(exact, recipe, errors, max_logit))


def _verdict(exact, recipe, errors, max_logit):
    """The verdict and the remedy."""
    worst = max(errors[n] for n in ("O", "dQ", "dK", "dV"))
    if not math.isfinite(worst):
        return "not finite: check the inputs", ""
    if worst < FINE:
        return "fine", ""
    # What helps most? Try each remedy on the same tensors.
    remedies = {
        "S in floating point": replace(recipe, high_precision=("S", "S'")),
        "P·V in floating point": replace(recipe, high_precision=("O",)),
        'backward="bf16"': replace(recipe, high_precision=("dV", "dP", "dQ", "dK")),
    }
    tried = {
        name: max(_errors(exact, r)[0][n] for n in ("O", "dQ", "dK", "dV"))
        for name, r in remedies.items()
    }
    best = min(tried, key=tried.get)
    state = "usable" if worst < USABLE else "sensitive"
    cause = " (large logits)" if max_logit > 30 else ""
    return f"{state}{cause}; {best} gives {tried[best]:.3f}", best


# --- exact attention and the errors against it ----------------------------------------------------


def _mask(layer):
    sq, sk = layer.q.shape[2], layer.k.shape[2]
    shift = 0 if layer.top_left else sk - sq
    i = torch.arange(sq, device=layer.q.device)[:, None] + shift
    j = torch.arange(sk, device=layer.q.device)[None, :]
    left, right = layer.window
    mask = torch.ones(sq, sk, dtype=torch.bool, device=layer.q.device)
    if left >= 0:
        mask &= j >= i - left
    if layer.causal or right >= 0:
        mask &= j <= i + (0 if layer.causal else right)
    return mask


def _scale(layer):
    return layer.scale if layer.scale is not None else layer.q.shape[-1] ** -0.5


def _repeat(layer):
    group = layer.q.shape[1] // layer.k.shape[1]
    return layer.k.repeat_interleave(group, 1), layer.v.repeat_interleave(group, 1)


def _exact(layer):
    """O, dQ, dK, dV, P, dS and the largest logit in float64. This takes [b, h, n, n] tensors, so
    diagnose with short sequences."""
    q, dout = layer.q.double(), layer.dout.double()
    k, v = (t.double() for t in _repeat(layer))
    scale = _scale(layer)
    s = (q @ k.mT * scale).masked_fill(~_mask(layer), -math.inf)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    out = p @ v
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    heads = layer.k.shape[1]
    fold = lambda t: t.unflatten(1, (heads, -1)).sum(2)  # noqa: E731  dk, dv of a kv head sum over its queries
    return {
        "O": out,
        "dQ": ds @ k * scale,
        "dK": fold(ds.mT @ q * scale),
        "dV": fold(p.mT @ dout),
        "P": p,
        "dS": ds,
        "max_logit": s.max().item(),
    }


def _errors(exact, recipe):
    """Relative errors over all pieces of a layer, given with their exact results, and its largest
    logit."""
    squares, tops = {}, []
    for layer, want in exact:
        got, top = _int8(layer, recipe)
        tops.append(top)
        for name, value in got.items():
            error, norm = squares.get(name, (0.0, 0.0))
            difference = value.detach().double() - want[name]
            squares[name] = (
                error + difference.square().sum().item(),
                norm + want[name].square().sum().item(),
            )
    rel = lambda error, norm: math.sqrt(error / norm) if norm > 0 else 0.0
    return {name: rel(*pair) for name, pair in squares.items()}, max(tops)


def _int8(layer, recipe):
    """What INT8 attention computes of a layer, and its largest logit."""
    leaves = [t.requires_grad_() for t in (layer.q.clone(), layer.k.clone(), layer.v.clone())]
    out, lse, top = attention(
        *leaves,
        layout="bhsd",
        causal=layer.causal,
        softmax_scale=layer.scale,
        window_size=layer.window,
        align="top_left" if layer.top_left else "bottom_right",
        recipe=recipe,
        return_lse=True,
        return_max_logit=True,
    )
    dq, dk, dv = torch.autograd.grad(out, leaves, layer.dout.to(out.dtype))
    got = {"O": out, "dQ": dq, "dK": dk, "dV": dv}
    p = _rebuilt_p(layer, recipe, lse)
    if p is not None:
        v = _value_codes(_repeat(layer)[1], recipe)
        dout = layer.dout.double()
        got["P"] = p
        got["dS"] = p * (dout @ v.mT - (dout * out.double()).sum(-1, keepdim=True))
    return got, top.max().item()


def _rebuilt_p(layer, recipe, lse) -> Optional[torch.Tensor]:
    """P as the backward rebuilds it: from the codes of q and k and the saved lse. None with
    Q-smoothing."""
    if recipe.smooth_q:
        return None
    k, v = _repeat(layer)
    q, k, *_ = padding.padded(layer.q, k, v, None)  # as it was rotated
    q, k = q.float(), k.float()
    one_mean = recipe.smooth_k and recipe.scheme == "paper"
    mean = k.double().mean(2, keepdim=True).float() if one_mean else torch.zeros_like(k[:, :, :1])
    if "S'" in recipe.high_precision:
        s = q.double() @ (k - mean).double().mT
    else:
        turn = _rotated if recipe.rotate else lambda x: x
        s = _codes(turn(q), _queries_per_scale(recipe)) @ _key_codes(k - mean, recipe, turn).mT
    s = s * _scale(layer) + _scale(layer) * (q.double() @ mean.double().mT)
    p = torch.exp(s - lse.double()[..., None])
    return p.masked_fill(~_mask(layer), 0.0)


def _value_codes(v, recipe):
    """The values that dP is made from: in ``vectorwise`` what the codes stand for, so that dS is
    the gradient of what the forward computed."""
    if recipe.scheme == "paper" or "O" in recipe.high_precision:
        return v.double()
    v = v.float()
    centres = _centres(v, first=1, least=0.02) if recipe.smooth_k else torch.zeros_like(v)
    return _codes(v - centres, 1) + centres.double()


def _queries_per_scale(recipe):
    return (recipe.tile_q or 128) if recipe.scheme == "paper" else 1


def _key_codes(k, recipe, turn):
    """What the codes of K stand for, in float64; ``turn`` rotates."""
    if recipe.scheme == "paper":
        return _codes(turn(k), recipe.tile_k or 64)
    centres = _centres(k, 0, turn) if recipe.smooth_k else torch.zeros_like(k)
    return _codes(turn(k) - centres, 1, bits=22) + centres.double()


def _centres(x, first, turn=lambda x: x, least=0.0):
    """What ``vectorwise`` takes out of K or V before it is quantised, from block ``first``
    on and where the mean has this share of the energy at least: src/numerics/octaves.h."""
    centres = torch.zeros_like(x)
    block = first  # the first of an octave
    while 128 * block < x.shape[2]:
        after = max(1, 2 * block)
        sample = x[:, :, _sampled(block)].double()
        mean = sample.mean(2, keepdim=True)
        energy = sample.square().sum(-1, keepdim=True).mean(2, keepdim=True)
        stands_out = mean.square().sum(-1, keepdim=True) >= least * energy
        mean = turn((mean * stands_out).float())
        centres[:, :, 128 * block : 128 * after] = _codes(mean, 1)
        block = after
    return centres


# Signs of the rotation, 32 channels to a number and 1 for minus: src/numerics/rotate.h.
_SIGNS = (
    *(0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A),
    *(0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19),
)


def _rotated(x):
    """x times the matrix of ``Recipe.rotate``: signs, then a Hadamard matrix over blocks of
    channels. Sums are float32 in the order of the kernels, so that codes agree bit for bit."""
    d = x.shape[-1]
    signs = [-1.0 if _SIGNS[c // 32] >> c % 32 & 1 else 1.0 for c in range(d)]
    x = x * torch.tensor(signs, dtype=x.dtype, device=x.device)
    n = d & -d
    half = 1
    while half < n:
        pairs = x.unflatten(-1, (-1, 2, half))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x * n**-0.5


def _sampled(block):
    """The keys whose mean centres the octave that begins with a block."""
    if block < 2:
        return slice(0, 128 * block or 1)
    step = block // 2  # one key of so many neighbours
    spread = ((n * 2654435761 % 2**32 >> 8) % step for n in range(128))
    return [64 * block + n * step + at for n, at in enumerate(spread)]


def _codes(x, block, bits=24):
    """x after INT8 quantisation with one scale per ``block`` tokens, in float64. Scales of fewer
    bits than a float32 has are rounded up."""
    n = x.shape[2]
    blocks = torch.nn.functional.pad(x, (0, 0, 0, -n % block)).unflatten(2, (-1, block))
    scale = blocks.abs().amax((-1, -2), keepdim=True) / 127
    rest = 2 ** (24 - bits) - 1
    scale = ((scale.view(torch.int32) + rest) & ~rest).view(torch.float32)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (torch.round(blocks * inverse).double() * scale.double()).flatten(2, 3)[:, :, :n]
